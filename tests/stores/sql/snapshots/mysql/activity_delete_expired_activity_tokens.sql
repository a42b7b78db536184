SELECT idempotency_activity_tokens.token
FROM idempotency_activity_tokens
WHERE idempotency_activity_tokens.expires_at <= %(my_horizon)s AND idempotency_activity_tokens.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_activity_tokens.expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_activity_tokens WHERE idempotency_activity_tokens.token IN (__[POSTCOMPILE_my_chosen]) AND idempotency_activity_tokens.expires_at <= %(my_horizon)s AND idempotency_activity_tokens.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
