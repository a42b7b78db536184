UPDATE idempotency_outbox SET holder=NULL, held_until=NULL WHERE idempotency_outbox.holder = ? AND idempotency_outbox.published_at IS NULL AND idempotency_outbox.seq IN (__[POSTCOMPILE_seqs])
