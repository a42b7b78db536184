SELECT idempotency_outbox.topic, idempotency_outbox."key", idempotency_outbox.lane, idempotency_outbox.digest, CASE WHEN (idempotency_outbox.wrapping_key_id IS NULL) THEN idempotency_outbox.body END AS body
FROM idempotency_outbox
WHERE idempotency_outbox.message_id = ? OR idempotency_outbox.message_id = ? OR idempotency_outbox.message_id = ? AND idempotency_outbox.sent_id IS NULL AND (idempotency_outbox.namespace IS NULL OR idempotency_outbox.namespace = ?) AND idempotency_outbox.tenant IS ?
