SELECT coalesce(idempotency_records.wrapping_key_id, '') AS wrapping_key_id, count(*) AS responses
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.data_key_number, 1) != 0 GROUP BY coalesce(idempotency_records.wrapping_key_id, '')
