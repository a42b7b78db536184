SELECT idempotency_audit.verb, idempotency_audit.was, idempotency_audit.step, idempotency_audit.actor, idempotency_audit.reason, idempotency_audit.forced, idempotency_audit.certain, idempotency_audit.changed_at
FROM idempotency_audit
WHERE idempotency_audit.record_id = %(my_record_id)s AND idempotency_audit.expires_at > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_audit.changed_at DESC, idempotency_audit.token DESC
 LIMIT %(my_limit)s
