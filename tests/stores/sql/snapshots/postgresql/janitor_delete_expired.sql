WITH chosen AS
(SELECT idempotency_records.record_id AS record_id
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s::BIGINT AND idempotency_records.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_records.expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_records WHERE idempotency_records.record_id IN (SELECT chosen.record_id
FROM chosen) AND (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s::BIGINT AND idempotency_records.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
