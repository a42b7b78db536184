SELECT idempotency_activity.owner, idempotency_activity.bucket_length, idempotency_activity.bucket_start
FROM idempotency_activity
WHERE idempotency_activity.expires_at <= %(my_horizon)s AND idempotency_activity.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_activity.expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_activity WHERE (idempotency_activity.owner, idempotency_activity.bucket_length, idempotency_activity.bucket_start) IN (__[POSTCOMPILE_my_chosen]) AND idempotency_activity.expires_at <= %(my_horizon)s AND idempotency_activity.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
