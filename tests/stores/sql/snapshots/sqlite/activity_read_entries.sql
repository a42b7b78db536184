SELECT idempotency_audit.verb, idempotency_audit.was, idempotency_audit.step, idempotency_audit.actor, idempotency_audit.reason, idempotency_audit.forced, idempotency_audit.certain, idempotency_audit.changed_at
FROM idempotency_audit
WHERE idempotency_audit.record_id = ? AND idempotency_audit.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_audit.changed_at DESC, idempotency_audit.token DESC
 LIMIT ? OFFSET ?
