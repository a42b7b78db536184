SELECT coalesce(idempotency_records.wrapping_key_id, '') AS wrapping_key_id, count(*) AS responses
FROM idempotency_records
WHERE coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.state IN ('completed', 'failed') GROUP BY coalesce(idempotency_records.wrapping_key_id, '')
