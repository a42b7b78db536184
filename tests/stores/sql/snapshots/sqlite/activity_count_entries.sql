SELECT count(*) AS count_1
FROM idempotency_audit
WHERE idempotency_audit.actor = ? AND idempotency_audit.changed_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - ?
