SELECT idempotency_records.state, idempotency_records.token, idempotency_records.fence, idempotency_records.step_write, idempotency_records.expires_at, idempotency_records.completed_at, idempotency_records.reason, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s LOCK IN SHARE MODE
