DELETE FROM idempotency_data_keys WHERE idempotency_data_keys.tid = ? AND idempotency_data_keys.number = ? AND idempotency_data_keys.closed_at IS NOT NULL
