WITH chosen AS
(SELECT idempotency_observations.record_id AS record_id
FROM idempotency_observations
WHERE idempotency_observations.expires_at <= %(my_horizon)s::BIGINT AND idempotency_observations.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_observations.expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_observations WHERE idempotency_observations.record_id IN (SELECT chosen.record_id
FROM chosen) AND idempotency_observations.expires_at <= %(my_horizon)s::BIGINT AND idempotency_observations.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
