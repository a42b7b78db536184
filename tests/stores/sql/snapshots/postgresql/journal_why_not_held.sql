SELECT idempotency_records.state, idempotency_records.token, idempotency_records.fence, idempotency_records.step_write, idempotency_records.expires_at, idempotency_records.completed_at, idempotency_records.reason, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s
