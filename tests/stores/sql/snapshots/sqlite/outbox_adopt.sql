UPDATE idempotency_outbox SET namespace=?, lane=? WHERE idempotency_outbox.seq = ? AND idempotency_outbox.namespace IS NULL
