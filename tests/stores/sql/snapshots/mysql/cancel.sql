INSERT INTO idempotency_records (record_id, tenant_id, token, fingerprint, state, on_expiry, tenant, principal, method, endpoint, fence, attempt, in_quota, requested_at, expires_at) SELECT %(my_record_id)s AS anon_1, %(my_tenant_id)s AS anon_2, %(my_token)s AS anon_3, %(no_fingerprint)s AS anon_4, 'released', 'quarantine', '', '', '', '', 0, 0, 0, moment.now, moment.now + 86400000000 AS anon_5
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment
WHERE moment.now IS NOT NULL
