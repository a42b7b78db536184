INSERT INTO idempotency_activity (owner, bucket_length, bucket_start, expires_at, counts) SELECT %(my_owner)s AS anon_1, %(my_length)s AS anon_2, %(my_start)s AS anon_3, %(my_expires_at)s AS anon_4, '{}' FROM DUAL
WHERE 1 = 1 ON DUPLICATE KEY UPDATE owner = idempotency_activity.owner
