SELECT idempotency_records.rid
FROM idempotency_records
WHERE idempotency_records.rid > ? ORDER BY idempotency_records.rid
 LIMIT 2 OFFSET ? - 1
