INSERT INTO idempotency_data_keys (tid, number, kid, wrapped, made_at) VALUES (?, ?, ?, ?, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)))
