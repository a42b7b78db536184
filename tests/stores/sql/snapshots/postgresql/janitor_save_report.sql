INSERT INTO idempotency_tasks (name, reported_at, report) SELECT %(my_name)s::VARCHAR AS anon_1, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS coalesce_1, %(my_report)s::VARCHAR AS anon_2
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET reported_at = excluded.reported_at, report = excluded.report
