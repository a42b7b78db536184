SELECT idempotency_outbox.seq, coalesce(idempotency_outbox.sent_id, idempotency_outbox.message_id) AS message_id, idempotency_outbox.topic, idempotency_outbox.key, idempotency_outbox.tenant, idempotency_outbox.tenant_id, idempotency_outbox.headers, idempotency_outbox.body, idempotency_outbox.wrapping_key_id, idempotency_outbox.data_key_number, idempotency_outbox.attempts, idempotency_outbox.lane
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL AND (idempotency_outbox.namespace IS NULL OR idempotency_outbox.namespace IN (__[POSTCOMPILE_namespaces])) AND idempotency_outbox.wrapping_key_id != %(newest)s::VARCHAR AND idempotency_outbox.seq > %(after)s::BIGINT ORDER BY idempotency_outbox.seq
 LIMIT %(limit)s::BIGINT
