SELECT idempotency_data_keys.tenant_id, idempotency_data_keys.number, idempotency_data_keys.wrapping_key_id, idempotency_data_keys.wrapped_key, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_data_keys.disabled_at AS disabled_for
FROM idempotency_data_keys
WHERE idempotency_data_keys.wrapping_key_id = ?
 LIMIT ? OFFSET ?
