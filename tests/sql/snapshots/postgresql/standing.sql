SELECT idempotency_records.state, idempotency_records.token, idempotency_records.expires_at, idempotency_records.counted, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s
