SELECT idempotency_outbox.seq, idempotency_outbox.topic AS topic, idempotency_outbox.`key` AS `key`, idempotency_outbox.tenant AS tenant, idempotency_outbox.tenant_id AS tenant_id, idempotency_outbox.wrapping_key_id IS NOT NULL AS sealed
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL AND idempotency_outbox.namespace IS NULL AND idempotency_outbox.seq > %(after)s ORDER BY idempotency_outbox.seq
 LIMIT %(limit)s
