INSERT INTO idempotency_activity (owner, bucket_length, bucket_start, expires_at, counts) SELECT %(my_owner)s AS anon_1, %(my_length)s::BIGINT AS anon_2, %(my_start)s::BIGINT AS anon_3, %(my_expires_at)s::BIGINT AS anon_4, '{}'
WHERE 1 = 1 ON CONFLICT DO NOTHING
