SELECT idempotency_data_keys.tenant_id, idempotency_data_keys.number, idempotency_data_keys.wrapping_key_id, idempotency_data_keys.wrapped_key, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) - idempotency_data_keys.disabled_at AS disabled_for
FROM idempotency_data_keys
WHERE idempotency_data_keys.wrapping_key_id = %(my_wrapping_key_id)s
 LIMIT %(my_limit)s
