WITH moment AS
(SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now)
 SELECT both_.edge, CAST(sum(both_.records) AS BIGINT) AS records, CAST(sum(both_.bytes) AS BIGINT) AS bytes
FROM (SELECT idempotency_ledger.edge AS edge, idempotency_ledger.records AS records, idempotency_ledger.bytes AS bytes
FROM idempotency_ledger
WHERE idempotency_ledger.tid = ? AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > (SELECT moment.now
FROM moment) UNION ALL SELECT idempotency_records.expires_at AS expires_at, -1 AS anon_1, -idempotency_records.byte_size AS anon_2
FROM idempotency_records
WHERE idempotency_records.tid = ? AND idempotency_records.counted = 1 AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > (SELECT moment.now
FROM moment)) AS both_ GROUP BY both_.edge
HAVING CAST(sum(both_.records) AS BIGINT) != 0 OR CAST(sum(both_.bytes) AS BIGINT) != 0
