INSERT INTO idempotency_data_keys (tenant_id, number, wrapping_key_id, wrapped_key, created_at) VALUES (?, ?, ?, ?, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)))
