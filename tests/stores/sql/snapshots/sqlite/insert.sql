INSERT INTO idempotency_records (record_id, tenant_id, state, fence, token, fingerprint, on_expiry, tenant, principal, method, endpoint, in_quota, attempt, requested_at, lease_expires_at) SELECT ? AS anon_1, ? AS anon_2, 'processing', ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7, ? AS anon_8, ? AS anon_9, ? AS anon_10, ? AS anon_11, 1, moment.now, moment.now + ? AS anon_12
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = ?)) ON CONFLICT (record_id) DO NOTHING  RETURNING fence
