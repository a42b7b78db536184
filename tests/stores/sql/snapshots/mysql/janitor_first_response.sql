SELECT min(idempotency_records.response_expires_at) AS first
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) = 1 AND coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.response_expires_at <= %(my_horizon)s AND idempotency_records.response_expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AND idempotency_records.response_expires_at > coalesce((SELECT idempotency_meta.value - 60000000 AS anon_1
FROM idempotency_meta
WHERE idempotency_meta.name = 'responses_removed' AND idempotency_meta.value <= %(my_horizon)s), 0)
