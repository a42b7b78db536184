INSERT INTO idempotency_tasks (name, reported_at, report) SELECT %(my_name)s AS anon_1, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS coalesce_1, %(my_report)s AS anon_2 FROM DUAL
WHERE 1 = 1 ON DUPLICATE KEY UPDATE reported_at = VALUES(reported_at), report = VALUES(report)
