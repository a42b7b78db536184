SELECT idempotency_data_keys.tid, idempotency_data_keys.number, idempotency_data_keys.kid, idempotency_data_keys.wrapped, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - idempotency_data_keys.closed_at AS closed_for
FROM idempotency_data_keys
WHERE idempotency_data_keys.kid != %(my_kid)s::VARCHAR ORDER BY idempotency_data_keys.tid, idempotency_data_keys.number
