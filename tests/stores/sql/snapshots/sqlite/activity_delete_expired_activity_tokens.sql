DELETE FROM idempotency_activity_tokens WHERE idempotency_activity_tokens.token IN (SELECT chosen.token
FROM (SELECT idempotency_activity_tokens.token AS token
FROM idempotency_activity_tokens
WHERE idempotency_activity_tokens.expires_at <= ? AND idempotency_activity_tokens.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_activity_tokens.expires_at
 LIMIT ? OFFSET ?) AS chosen) AND idempotency_activity_tokens.expires_at <= ? AND idempotency_activity_tokens.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))
