UPDATE idempotency_outbox SET holder=NULL, held_until=NULL WHERE idempotency_outbox.holder = ? AND idempotency_outbox.published_at IS NULL
