SELECT idempotency_data_keys.tid, idempotency_data_keys.number, idempotency_data_keys.kid, idempotency_data_keys.wrapped, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_data_keys.closed_at AS closed_for
FROM idempotency_data_keys
WHERE idempotency_data_keys.kid != ? ORDER BY idempotency_data_keys.tid, idempotency_data_keys.number
