DELETE FROM idempotency_data_keys WHERE idempotency_data_keys.tenant_id = ? AND idempotency_data_keys.number = ? AND idempotency_data_keys.disabled_at IS NOT NULL
