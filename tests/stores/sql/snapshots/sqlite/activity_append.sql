INSERT INTO idempotency_audit (token, record_id, tenant_id, verb, was, step, actor, reason, forced, certain, changed_at, expires_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7, ? AS anon_8, ? AS anon_9, ? AS anon_10, moment.now, moment.now + 34560000000000 AS anon_11
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE 1 = 1 ON CONFLICT (token) DO NOTHING
