SELECT idempotency_data_keys.wrapping_key_id, count(*) AS keys_
FROM idempotency_data_keys GROUP BY idempotency_data_keys.wrapping_key_id
