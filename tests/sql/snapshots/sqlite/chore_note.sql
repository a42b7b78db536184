INSERT INTO idempotency_chores (name, noted_at, report) SELECT ? AS anon_1, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS coalesce_1, ? AS anon_2
WHERE 1 = 1 ON CONFLICT (name) DO UPDATE SET noted_at = excluded.noted_at, report = excluded.report
