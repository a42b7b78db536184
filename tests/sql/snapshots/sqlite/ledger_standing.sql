SELECT limits.now, limits.records AS max_records, limits.bytes AS max_bytes, limits.in_flight AS max_in_flight, limits.new_keys AS max_new_keys, limits.span AS max_span, (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tid = ? AND others.counted = 1 AND others.lease_until IS NOT NULL) AS unsettled, (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tid = ? AND others.counted = 1 AND others.lease_until IS NOT NULL AND others.lease_until > limits.now AND others.state = 'processing') AS in_flight, (SELECT CAST(coalesce(sum(idempotency_ledger.records), 0) AS BIGINT) AS coalesce_1
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > limits.now) AS records, (SELECT CAST(coalesce(sum(idempotency_ledger.bytes), 0) AS BIGINT) AS coalesce_2
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > limits.now) AS bytes, (SELECT CAST(coalesce(sum(idempotency_ledger.records), 0) AS BIGINT) AS coalesce_3
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'keys' AND idempotency_ledger.edge = (limits.now / limits.span + 1) * limits.span AND idempotency_ledger.span = limits.span) AS new_keys, (SELECT min(others.lease_until) AS min_1
FROM idempotency_records AS others
WHERE others.tid = ? AND others.counted = 1 AND others.lease_until IS NOT NULL AND others.lease_until > limits.now AND others.state = 'processing') AS first_lease, (SELECT min(idempotency_ledger.edge) AS min_2
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > limits.now) AS first_edge, EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.rid = ?) AS known
FROM (SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, ?) AS records, coalesce(idempotency_tenants.limit_bytes, ?) AS bytes, coalesce(idempotency_tenants.limit_in_flight, ?) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, ?) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE ? END AS span
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tid = ?) AS limits
