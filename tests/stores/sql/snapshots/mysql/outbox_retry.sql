UPDATE idempotency_outbox SET due_at=CASE WHEN (idempotency_outbox.ready_at IS NULL) THEN coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ELSE idempotency_outbox.due_at END, holder=NULL, held_until=NULL, dead=0, error=NULL, ready_at=CASE WHEN (idempotency_outbox.ready_at IS NOT NULL) THEN coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) END WHERE idempotency_outbox.seq = %(my_seq)s AND idempotency_outbox.published_at IS NULL AND NOT (coalesce(idempotency_outbox.held_until, 0) > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AND coalesce(idempotency_outbox.held_until, 0) <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) + 3600000000) AND (idempotency_outbox.namespace IS NULL OR idempotency_outbox.namespace IN (__[POSTCOMPILE_namespaces]))
;
SELECT idempotency_outbox.topic AS topic
FROM idempotency_outbox
WHERE idempotency_outbox.seq = %(my_seq)s
