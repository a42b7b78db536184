DELETE FROM idempotency_data_keys WHERE idempotency_data_keys.tenant_id = %(my_tenant_id)s
