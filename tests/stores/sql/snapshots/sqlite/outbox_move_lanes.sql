UPDATE idempotency_outbox SET namespace=? WHERE idempotency_outbox.namespace = ? AND idempotency_outbox.published_at IS NULL AND idempotency_outbox.lane IS NOT NULL
