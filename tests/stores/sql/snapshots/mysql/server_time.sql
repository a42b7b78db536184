SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now
