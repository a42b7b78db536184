DELETE FROM idempotency_outbox WHERE idempotency_outbox.seq IN (SELECT idempotency_outbox.seq
FROM idempotency_outbox
WHERE idempotency_outbox.published_at <= ? ORDER BY idempotency_outbox.published_at
 LIMIT ? OFFSET ?)
