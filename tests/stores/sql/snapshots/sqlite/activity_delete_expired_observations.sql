DELETE FROM idempotency_observations WHERE idempotency_observations.record_id IN (SELECT chosen.record_id
FROM (SELECT idempotency_observations.record_id AS record_id
FROM idempotency_observations
WHERE idempotency_observations.expires_at <= ? AND idempotency_observations.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_observations.expires_at
 LIMIT ? OFFSET ?) AS chosen) AND idempotency_observations.expires_at <= ? AND idempotency_observations.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))
