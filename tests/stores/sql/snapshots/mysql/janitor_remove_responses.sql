SELECT idempotency_records.record_id
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) = 1 AND coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.response_expires_at <= %(my_horizon)s AND idempotency_records.response_expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AND idempotency_records.response_expires_at > coalesce((SELECT idempotency_meta.value - 60000000 AS anon_1
FROM idempotency_meta
WHERE idempotency_meta.name = 'responses_removed' AND idempotency_meta.value <= %(my_horizon)s), 0) ORDER BY idempotency_records.response_expires_at
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
UPDATE idempotency_records SET response_size=0, response=x'', wrapping_key_id='', data_key_number=0 WHERE idempotency_records.record_id IN (__[POSTCOMPILE_my_chosen]) AND idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) = 1 AND coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.response_expires_at <= %(my_horizon)s AND idempotency_records.response_expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
;
SELECT idempotency_records.response_expires_at
FROM idempotency_records
WHERE idempotency_records.record_id IN (__[POSTCOMPILE_my_chosen])
