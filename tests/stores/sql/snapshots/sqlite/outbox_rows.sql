SELECT idempotency_outbox.seq, idempotency_outbox.message_id, idempotency_outbox.topic, CASE WHEN (idempotency_outbox.dead = 1) THEN 'dead' WHEN (idempotency_outbox.held_until > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) THEN 'held' WHEN (idempotency_outbox.due_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) THEN 'delayed' ELSE 'due' END AS state, idempotency_outbox.attempts, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_outbox.created_at AS age, idempotency_outbox.due_at - coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS wait, idempotency_outbox.error, (SELECT count(*) AS count_1
FROM idempotency_outbox AS later
WHERE later.topic = idempotency_outbox.topic AND later."key" = idempotency_outbox."key" AND later.seq > idempotency_outbox.seq AND later.published_at IS NULL) AS behind
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL AND (? = 0 OR idempotency_outbox.dead = 1) ORDER BY idempotency_outbox.dead DESC, idempotency_outbox.seq
 LIMIT ? OFFSET ?
