SELECT idempotency_chores.name, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - idempotency_chores.noted_at AS ago, idempotency_chores.report
FROM idempotency_chores
WHERE idempotency_chores.noted_at IS NOT NULL
