SELECT idempotency_records.state, idempotency_records.counted, idempotency_records.expires_at, idempotency_records.byte_size, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s AND idempotency_records.state != 'quarantined' FOR UPDATE
