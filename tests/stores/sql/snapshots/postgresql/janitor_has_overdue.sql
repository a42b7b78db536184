SELECT EXISTS (SELECT 1
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s::BIGINT AND idempotency_records.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)) AS anon_1
