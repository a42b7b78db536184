INSERT INTO idempotency_tasks (name, reported_at, report) SELECT ? AS anon_1, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS coalesce_1, ? AS anon_2
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET reported_at = excluded.reported_at, report = excluded.report
