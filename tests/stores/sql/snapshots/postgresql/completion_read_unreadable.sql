SELECT idempotency_records.state, idempotency_records.in_quota, idempotency_records.completed_at, idempotency_records.expires_at, idempotency_records.response_expires_at, idempotency_records.response_size, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.state != 'quarantined' FOR UPDATE
