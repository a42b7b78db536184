WITH chosen AS
(SELECT idempotency_records.record_id AS record_id
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) AND coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.response_expires_at <= %(my_horizon)s::BIGINT AND idempotency_records.response_expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) ORDER BY idempotency_records.response_expires_at
 LIMIT %(my_limit)s::INTEGER FOR UPDATE SKIP LOCKED)
 UPDATE idempotency_records SET response_size=0, response=''::bytea, wrapping_key_id='', data_key_number=0 WHERE idempotency_records.record_id IN (SELECT chosen.record_id
FROM chosen) AND idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) AND coalesce(idempotency_records.data_key_number, 1) != 0 AND idempotency_records.response_expires_at <= %(my_horizon)s::BIGINT AND idempotency_records.response_expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
