UPDATE idempotency_steps SET payload_size=%(my_payload_size)s, payload=%(my_payload)s, wrapping_key_id=%(my_wrapping_key_id)s, data_key_number=%(my_data_key_number)s WHERE idempotency_steps.record_id = %(my_record_id)s AND idempotency_steps.step_id = %(my_step_id)s AND idempotency_steps.payload_size = %(seen_payload_size)s AND idempotency_steps.wrapping_key_id <=> %(seen_wrapping_key_id)s AND idempotency_steps.data_key_number <=> %(seen_data_key_number)s AND idempotency_steps.payload = %(seen_payload)s AND (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = idempotency_steps.record_id AND idempotency_records.requested_at = idempotency_steps.requested_at AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.response IS NULL)) AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_steps.tenant_id AND idempotency_data_keys.number = %(my_data_key_number)s AND idempotency_data_keys.disabled_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_steps.tenant_id AND idempotency_tenants.erased_at >= idempotency_steps.requested_at))
