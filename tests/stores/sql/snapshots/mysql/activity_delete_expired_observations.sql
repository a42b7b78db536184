SELECT idempotency_observations.record_id
FROM idempotency_observations
WHERE idempotency_observations.expires_at <= %(my_horizon)s AND idempotency_observations.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_observations.expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_observations WHERE idempotency_observations.record_id IN (__[POSTCOMPILE_my_chosen]) AND idempotency_observations.expires_at <= %(my_horizon)s AND idempotency_observations.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
