DELETE FROM idempotency_data_keys WHERE idempotency_data_keys.tenant_id = %(my_tenant_id)s AND idempotency_data_keys.number = %(my_number)s AND idempotency_data_keys.disabled_at IS NOT NULL
