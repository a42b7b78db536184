SELECT EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_records.tenant_id AND idempotency_tenants.erased_at >= idempotency_records.requested_at) AS erased, EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_records.tenant_id AND idempotency_data_keys.number = ? AND idempotency_data_keys.disabled_at IS NULL) AS kept
FROM idempotency_records
WHERE idempotency_records.record_id = ?
