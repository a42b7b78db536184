SELECT coalesce(idempotency_steps.wrapping_key_id, '') AS wrapping_key_id, count(*) AS payloads
FROM idempotency_steps INNER JOIN idempotency_records ON idempotency_records.record_id = idempotency_steps.record_id AND idempotency_records.requested_at = idempotency_steps.requested_at AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.response IS NULL
WHERE coalesce(idempotency_steps.data_key_number, 1) != 0 AND idempotency_steps.payload IS NOT NULL GROUP BY coalesce(idempotency_steps.wrapping_key_id, '')
