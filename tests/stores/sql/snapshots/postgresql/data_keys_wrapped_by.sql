SELECT idempotency_data_keys.tenant_id, idempotency_data_keys.number, idempotency_data_keys.wrapping_key_id, idempotency_data_keys.wrapped_key, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - idempotency_data_keys.disabled_at AS disabled_for
FROM idempotency_data_keys
WHERE idempotency_data_keys.wrapping_key_id = %(my_wrapping_key_id)s::VARCHAR
 LIMIT %(my_limit)s::INTEGER
