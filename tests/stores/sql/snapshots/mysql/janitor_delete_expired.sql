SELECT idempotency_records.record_id
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s AND idempotency_records.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) ORDER BY idempotency_records.expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_records WHERE idempotency_records.record_id IN (__[POSTCOMPILE_my_chosen]) AND (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s AND idempotency_records.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
