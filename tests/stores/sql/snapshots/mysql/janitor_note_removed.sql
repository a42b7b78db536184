INSERT INTO idempotency_meta (name, value) SELECT 'responses_removed', least(%(my_until)s, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))) AS least_1 FROM DUAL
WHERE 1 = 1 ON DUPLICATE KEY UPDATE value = VALUES(value)
