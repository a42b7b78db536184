SELECT idempotency_audit.token
FROM idempotency_audit
WHERE idempotency_audit.expires_at <= %(my_horizon)s AND idempotency_audit.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_audit.expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_audit WHERE idempotency_audit.token IN (__[POSTCOMPILE_my_chosen]) AND idempotency_audit.expires_at <= %(my_horizon)s AND idempotency_audit.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
