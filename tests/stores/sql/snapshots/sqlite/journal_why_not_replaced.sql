SELECT EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_steps.tenant_id AND idempotency_tenants.erased_at >= idempotency_steps.requested_at) AS erased, EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_steps.tenant_id AND idempotency_data_keys.number = ? AND idempotency_data_keys.disabled_at IS NULL) AS kept
FROM idempotency_steps
WHERE idempotency_steps.record_id = ? AND idempotency_steps.step_id = ? AND idempotency_steps.payload_size = ? AND idempotency_steps.wrapping_key_id IS ? AND idempotency_steps.data_key_number IS ? AND idempotency_steps.payload = ? AND (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = idempotency_steps.record_id AND idempotency_records.requested_at = idempotency_steps.requested_at AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.response IS NULL))
