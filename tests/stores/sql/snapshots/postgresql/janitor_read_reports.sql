SELECT idempotency_tasks.name, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - idempotency_tasks.reported_at AS ago, idempotency_tasks.report
FROM idempotency_tasks
WHERE idempotency_tasks.reported_at IS NOT NULL
