SELECT idempotency_tasks.name, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_tasks.reported_at AS ago, idempotency_tasks.report
FROM idempotency_tasks
WHERE idempotency_tasks.reported_at IS NOT NULL
