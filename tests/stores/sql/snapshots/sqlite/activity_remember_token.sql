INSERT INTO idempotency_activity_tokens (token, expires_at) SELECT ? AS anon_1, moment.now + 600000000 AS anon_2
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE 1 = 1 ON CONFLICT (token) DO NOTHING  RETURNING expires_at - 600000000 AS now
