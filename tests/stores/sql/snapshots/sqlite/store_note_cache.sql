INSERT INTO idempotency_meta (name, value) SELECT 'cached_since', coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS coalesce_1
WHERE 1 = 1 ON CONFLICT (name) DO NOTHING
