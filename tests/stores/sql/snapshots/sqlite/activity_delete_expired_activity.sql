DELETE FROM idempotency_activity WHERE (idempotency_activity.owner, idempotency_activity.bucket_length, idempotency_activity.bucket_start) IN (SELECT chosen.owner, chosen.bucket_length, chosen.bucket_start
FROM (SELECT idempotency_activity.owner AS owner, idempotency_activity.bucket_length AS bucket_length, idempotency_activity.bucket_start AS bucket_start
FROM idempotency_activity
WHERE idempotency_activity.expires_at <= ? AND idempotency_activity.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_activity.expires_at
 LIMIT ? OFFSET ?) AS chosen) AND idempotency_activity.expires_at <= ? AND idempotency_activity.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))
