WITH chosen AS
(SELECT idempotency_activity.owner AS owner, idempotency_activity.bucket_length AS bucket_length, idempotency_activity.bucket_start AS bucket_start
FROM idempotency_activity
WHERE idempotency_activity.expires_at <= %(my_horizon)s::BIGINT AND idempotency_activity.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_activity.expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_activity WHERE (idempotency_activity.owner, idempotency_activity.bucket_length, idempotency_activity.bucket_start) IN (SELECT chosen.owner, chosen.bucket_length, chosen.bucket_start
FROM chosen) AND idempotency_activity.expires_at <= %(my_horizon)s::BIGINT AND idempotency_activity.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
