INSERT INTO idempotency_facts (name, value) SELECT 'fence', coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS coalesce_1
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET value = max(idempotency_facts.value + 1, excluded.value)  RETURNING value
