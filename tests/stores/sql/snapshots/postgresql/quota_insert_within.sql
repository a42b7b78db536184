WITH limits AS
(SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, %(my_max_records)s::BIGINT) AS records, coalesce(idempotency_tenants.limit_bytes, %(my_max_bytes)s::BIGINT) AS bytes, coalesce(idempotency_tenants.limit_in_flight, %(my_max_in_flight)s::BIGINT) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, %(my_max_new_keys)s::BIGINT) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE %(my_window_length)s::BIGINT END AS window_length
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tenant_id = %(my_tenant_id)s),
granted AS
(INSERT INTO idempotency_records (record_id, tenant_id, state, fence, token, fingerprint, on_expiry, tenant, principal, method, endpoint, in_quota, succeeded, attempt, requested_at, lease_expires_at) SELECT %(my_record_id)s AS anon_4, %(my_tenant_id)s AS anon_5, 'processing', nextval('idempotency_fence_numbers_number_seq') AS next_value_1, %(my_token)s AS anon_6, %(my_fingerprint)s AS anon_7, %(my_on_expiry)s::VARCHAR AS anon_8, %(my_tenant)s::VARCHAR AS anon_9, %(my_principal)s::VARCHAR AS anon_10, %(my_method)s::VARCHAR AS anon_11, %(my_endpoint)s::VARCHAR AS anon_12, %(my_in_quota)s::SMALLINT AS anon_13, %(my_awaited)s::SMALLINT AS anon_14, 1, moment.now AS now, moment.now + %(lease)s::BIGINT AS anon_15
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS lock_timeout) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s)) AND (EXISTS (SELECT 1
FROM limits
WHERE CASE WHEN ((limits.records - %(my_margin)s::BIGINT IS NULL OR (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) + (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS BIGINT) AS coalesce_1
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) < limits.records - %(my_margin)s::BIGINT) AND (limits.bytes IS NULL OR (SELECT CAST(coalesce(sum(idempotency_quota.bytes), 0) AS BIGINT) AS coalesce_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) + (SELECT CAST(coalesce(sum(idempotency_steps.payload_size), 0) AS BIGINT) AS coalesce_3
FROM idempotency_steps JOIN idempotency_records AS others ON others.record_id = idempotency_steps.record_id AND others.requested_at = idempotency_steps.requested_at
WHERE idempotency_steps.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) < limits.bytes) AND (limits.in_flight - %(my_margin)s::BIGINT IS NULL OR (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > limits.now AND others.state = 'processing') < limits.in_flight - %(my_margin)s::BIGINT) AND (limits.new_keys - %(my_margin)s::BIGINT IS NULL OR (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS BIGINT) AS coalesce_4
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'new_keys' AND idempotency_quota.bucket_end = (limits.now / limits.window_length + 1) * limits.window_length AND idempotency_quota.window_length = limits.window_length) < limits.new_keys - %(my_margin)s::BIGINT)) THEN pg_try_advisory_xact_lock_shared(%(my_tenants_number)s::BIGINT) ELSE false END)) ON CONFLICT (record_id) DO NOTHING  RETURNING idempotency_records.fence),
into_window AS
(INSERT INTO idempotency_quota (tenant_id, kind, bucket_end, window_length, shard, records, bytes) SELECT %(my_tenant_id)s AS anon_1, 'new_keys', (limits.now / limits.window_length + 1) * limits.window_length AS anon_2, limits.window_length AS window_length, %(my_shard)s::SMALLINT AS anon_3, 1, 0
FROM granted JOIN limits ON true
WHERE limits.new_keys IS NOT NULL ON CONFLICT (tenant_id, kind, bucket_end, window_length, shard) DO UPDATE SET records = idempotency_quota.records + excluded.records, bytes = idempotency_quota.bytes + excluded.bytes )
 SELECT granted.fence
FROM granted
