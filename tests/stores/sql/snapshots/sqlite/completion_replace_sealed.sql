UPDATE idempotency_records SET state=?, status=?, response_size=?, response=?, wrapping_key_id=?, data_key_number=? WHERE idempotency_records.record_id = ? AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_records.state = ? AND idempotency_records.status = ? AND idempotency_records.response_size = ? AND idempotency_records.wrapping_key_id IS ? AND idempotency_records.data_key_number IS ? AND idempotency_records.response = ? AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_records.tenant_id AND idempotency_data_keys.number = ? AND idempotency_data_keys.disabled_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_records.tenant_id AND idempotency_tenants.erased_at >= idempotency_records.requested_at)) RETURNING fence
