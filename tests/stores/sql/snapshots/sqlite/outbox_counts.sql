SELECT count(*) - coalesce(sum(idempotency_outbox.dead), 0) AS waiting, coalesce(sum(idempotency_outbox.dead), 0) AS dead, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - min(CASE WHEN (idempotency_outbox.dead = 0 AND idempotency_outbox.due_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) THEN idempotency_outbox.due_at END) AS oldest
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL
