INSERT INTO idempotency_chores (name, noted_at, report) SELECT %(my_name)s::VARCHAR AS anon_1, coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS coalesce_1, %(my_report)s::VARCHAR AS anon_2
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET noted_at = excluded.noted_at, report = excluded.report
