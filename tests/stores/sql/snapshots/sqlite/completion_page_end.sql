SELECT idempotency_records.record_id
FROM idempotency_records
WHERE idempotency_records.record_id > ? ORDER BY idempotency_records.record_id
 LIMIT 2 OFFSET ? - 1
