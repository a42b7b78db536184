SELECT count(*) - coalesce(sum(idempotency_outbox.dead), 0) AS waiting, coalesce(sum(idempotency_outbox.dead), 0) AS dead, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - min(CASE WHEN (idempotency_outbox.dead = 0 AND idempotency_outbox.due_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)) THEN idempotency_outbox.due_at END) AS oldest
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL
