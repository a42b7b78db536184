WITH chosen AS
(SELECT idempotency_activity_tokens.token AS token
FROM idempotency_activity_tokens
WHERE idempotency_activity_tokens.expires_at <= %(my_horizon)s::BIGINT AND idempotency_activity_tokens.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_activity_tokens.expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_activity_tokens WHERE idempotency_activity_tokens.token IN (SELECT chosen.token
FROM chosen) AND idempotency_activity_tokens.expires_at <= %(my_horizon)s::BIGINT AND idempotency_activity_tokens.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
