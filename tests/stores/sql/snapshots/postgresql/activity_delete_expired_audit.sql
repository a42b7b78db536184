WITH chosen AS
(SELECT idempotency_audit.token AS token
FROM idempotency_audit
WHERE idempotency_audit.expires_at <= %(my_horizon)s::BIGINT AND idempotency_audit.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_audit.expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_audit WHERE idempotency_audit.token IN (SELECT chosen.token
FROM chosen) AND idempotency_audit.expires_at <= %(my_horizon)s::BIGINT AND idempotency_audit.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
