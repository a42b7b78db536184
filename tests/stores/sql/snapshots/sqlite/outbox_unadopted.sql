SELECT idempotency_outbox.seq, idempotency_outbox.topic, idempotency_outbox."key", idempotency_outbox.tenant, idempotency_outbox.tenant_id, idempotency_outbox.wrapping_key_id IS NOT NULL AS sealed
FROM idempotency_outbox
WHERE idempotency_outbox.published_at IS NULL AND idempotency_outbox.namespace IS NULL AND idempotency_outbox.seq > ? ORDER BY idempotency_outbox.seq
 LIMIT ? OFFSET ?
