UPDATE idempotency_outbox SET body=?, wrapping_key_id=?, data_key_number=? WHERE idempotency_outbox.seq = ? AND idempotency_outbox.data_key_number = ?
