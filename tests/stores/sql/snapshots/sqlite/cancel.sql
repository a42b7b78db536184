INSERT INTO idempotency_records (record_id, tenant_id, token, fingerprint, state, on_expiry, tenant, principal, method, endpoint, fence, attempt, in_quota, requested_at, expires_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, 'released', 'quarantine', '', '', '', '', 0, 0, 0, moment.now, moment.now + 86400000000 AS anon_5
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE moment.now IS NOT NULL ON CONFLICT (record_id) DO NOTHING  RETURNING fence
