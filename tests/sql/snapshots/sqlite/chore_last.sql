SELECT idempotency_chores.name, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_chores.noted_at AS ago, idempotency_chores.report
FROM idempotency_chores
WHERE idempotency_chores.noted_at IS NOT NULL
