SELECT idempotency_tasks.name, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) - idempotency_tasks.reported_at AS ago, idempotency_tasks.report
FROM idempotency_tasks
WHERE idempotency_tasks.reported_at IS NOT NULL
