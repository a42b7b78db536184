INSERT INTO idempotency_activity (owner, bucket_length, bucket_start, expires_at, counts) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, '{}'
WHERE 1 = 1 ON CONFLICT DO NOTHING
