SELECT (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tid = ? AND others.counted = 1 AND others.lease_until IS NOT NULL) + (SELECT CAST(coalesce(sum(idempotency_ledger.records), 0) AS BIGINT) AS coalesce_1
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > moment.now) AS records, (SELECT CAST(coalesce(sum(idempotency_ledger.bytes), 0) AS BIGINT) AS coalesce_2
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > moment.now) AS bytes, (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tid = ? AND others.counted = 1 AND others.lease_until IS NOT NULL AND others.lease_until > moment.now AND others.state = 'processing') AS in_flight, (SELECT CAST(coalesce(max(windows.keys), 0) AS BIGINT) AS coalesce_3
FROM (SELECT sum(idempotency_ledger.records) AS keys
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'keys' AND idempotency_ledger.edge > moment.now GROUP BY idempotency_ledger.edge, idempotency_ledger.span) AS windows) AS new_keys
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
