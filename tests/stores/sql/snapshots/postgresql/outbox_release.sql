UPDATE idempotency_outbox SET holder=NULL, held_until=NULL WHERE idempotency_outbox.holder = %(holder)s AND idempotency_outbox.published_at IS NULL
