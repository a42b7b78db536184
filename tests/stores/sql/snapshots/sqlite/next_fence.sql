INSERT INTO idempotency_meta (name, value) SELECT 'fence', max(coalesce((SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'fence'), (SELECT max(idempotency_records.fence) AS max_2
FROM idempotency_records), 0) + 1, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) AS max_1
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET value = excluded.value  RETURNING value
