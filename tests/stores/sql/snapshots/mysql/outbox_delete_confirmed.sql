DELETE FROM idempotency_outbox WHERE idempotency_outbox.holder = %(holder)s AND idempotency_outbox.published_at IS NULL AND idempotency_outbox.seq IN (__[POSTCOMPILE_seqs])
