WITH moment AS MATERIALIZED
(SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now),
first AS MATERIALIZED
(SELECT idempotency_outbox.seq AS seq
FROM idempotency_outbox
WHERE idempotency_outbox.namespace = %(my_namespace)s::VARCHAR AND idempotency_outbox.published_at IS NULL AND idempotency_outbox.dead = 0 AND idempotency_outbox.topic ~ %(takes)s::VARCHAR AND idempotency_outbox.topic !~ %(before)s::VARCHAR AND coalesce(idempotency_outbox.ready_at, idempotency_outbox.due_at) <= (SELECT moment.now
FROM moment) AND (NOT (coalesce(idempotency_outbox.held_until, 0) > (SELECT moment.now
FROM moment) AND coalesce(idempotency_outbox.held_until, 0) <= (SELECT moment.now
FROM moment) + 3600000000) OR idempotency_outbox.holder = %(holder)s) AND (idempotency_outbox.lane IS NULL OR NOT (EXISTS (SELECT 1
FROM idempotency_outbox AS earlier
WHERE earlier.namespace = idempotency_outbox.namespace AND earlier.lane = idempotency_outbox.lane AND earlier.seq < idempotency_outbox.seq AND earlier.published_at IS NULL AND earlier.lane IS NOT NULL AND (earlier.dead != 0 OR coalesce(earlier.ready_at, earlier.due_at) > (SELECT moment.now
FROM moment) OR earlier.attempts > idempotency_outbox.attempts OR coalesce(earlier.held_until, 0) > (SELECT moment.now
FROM moment) AND coalesce(earlier.held_until, 0) <= (SELECT moment.now
FROM moment) + 3600000000 AND earlier.holder != %(holder)s)))) ORDER BY idempotency_outbox.attempts, idempotency_outbox.seq
 LIMIT %(limit)s::BIGINT)
 UPDATE idempotency_outbox SET holder=%(holder)s, held_until=((SELECT moment.now
FROM moment) + %(hold)s::BIGINT) WHERE idempotency_outbox.seq IN (SELECT first.seq
FROM first) RETURNING idempotency_outbox.seq, coalesce(idempotency_outbox.sent_id, idempotency_outbox.message_id) AS message_id, idempotency_outbox.topic AS topic, idempotency_outbox.key AS key, idempotency_outbox.tenant AS tenant, idempotency_outbox.headers AS headers, idempotency_outbox.wrapping_key_id AS wrapping_key_id, idempotency_outbox.tenant_id AS tenant_id, idempotency_outbox.body AS body, idempotency_outbox.lane AS lane, idempotency_outbox.data_key_number, idempotency_outbox.attempts
