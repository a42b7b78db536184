SELECT idempotency_meta.value AS store, coalesce(idempotency_tenants.last_key_number, 0) AS last, idempotency_data_keys.number, idempotency_data_keys.wrapping_key_id, idempotency_data_keys.wrapped_key, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_data_keys.disabled_at AS disabled_for
FROM idempotency_meta LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tenant_id = ? LEFT OUTER JOIN idempotency_data_keys ON idempotency_data_keys.tenant_id = ?
WHERE idempotency_meta.name = 'store' ORDER BY idempotency_data_keys.number
