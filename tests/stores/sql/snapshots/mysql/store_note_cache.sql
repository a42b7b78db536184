INSERT INTO idempotency_meta (name, value) SELECT 'cached_since', coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS coalesce_1 FROM DUAL
WHERE 1 = 1 ON DUPLICATE KEY UPDATE name = idempotency_meta.name
