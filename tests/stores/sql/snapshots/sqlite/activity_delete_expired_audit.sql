DELETE FROM idempotency_audit WHERE idempotency_audit.token IN (SELECT chosen.token
FROM (SELECT idempotency_audit.token AS token
FROM idempotency_audit
WHERE idempotency_audit.expires_at <= ? AND idempotency_audit.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_audit.expires_at
 LIMIT ? OFFSET ?) AS chosen) AND idempotency_audit.expires_at <= ? AND idempotency_audit.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))
