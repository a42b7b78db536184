SELECT idempotency_outbox.seq, idempotency_outbox.message_id, idempotency_outbox.topic, CASE WHEN (idempotency_outbox.dead = 1) THEN 'dead' WHEN (idempotency_outbox.held_until > coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)) THEN 'held' WHEN (idempotency_outbox.due_at > coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)) THEN 'delayed' ELSE 'due' END AS state, idempotency_outbox.attempts, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - idempotency_outbox.created_at AS age, idempotency_outbox.due_at - coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS wait, idempotency_outbox.error, (SELECT count(*) AS count_1
FROM idempotency_outbox AS later
WHERE later.topic = idempotency_outbox.topic AND later.key = idempotency_outbox.key AND later.seq > idempotency_outbox.seq AND later.published_at IS NULL) AS behind
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL AND (%(only_dead)s::BIGINT = 0 OR idempotency_outbox.dead = 1) ORDER BY idempotency_outbox.dead DESC, idempotency_outbox.seq
 LIMIT %(limit)s::BIGINT
