SELECT limits.now, limits.records AS max_records, limits.bytes AS max_bytes, limits.in_flight AS max_in_flight, limits.new_keys AS max_new_keys, limits.window_length AS max_window_length, (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tenant_id = ? AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) AS unsettled, (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tenant_id = ? AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > limits.now AND others.state = 'processing') AS in_flight, (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS BIGINT) AS coalesce_1
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = ? AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) AS records, (SELECT CAST(coalesce(sum(idempotency_quota.bytes), 0) AS BIGINT) AS coalesce_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = ? AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) + CASE WHEN (limits.bytes IS NOT NULL) THEN (SELECT CAST(coalesce(sum(idempotency_steps.payload_size), 0) AS BIGINT) AS coalesce_3
FROM idempotency_steps JOIN idempotency_records AS others ON others.record_id = idempotency_steps.record_id AND others.requested_at = idempotency_steps.requested_at
WHERE idempotency_steps.tenant_id = ? AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) ELSE 0 END AS bytes, (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS BIGINT) AS coalesce_4
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = ? AND idempotency_quota.kind = 'new_keys' AND idempotency_quota.bucket_end = (limits.now / limits.window_length + 1) * limits.window_length AND idempotency_quota.window_length = limits.window_length) AS new_keys, (SELECT min(others.lease_expires_at) AS min_1
FROM idempotency_records AS others
WHERE others.tenant_id = ? AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > limits.now AND others.state = 'processing') AS first_lease, (SELECT min(idempotency_quota.bucket_end) AS min_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = ? AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) AS first_bucket_end, EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = ?) AS known
FROM (SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, ?) AS records, coalesce(idempotency_tenants.limit_bytes, ?) AS bytes, coalesce(idempotency_tenants.limit_in_flight, ?) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, ?) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE ? END AS window_length
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tenant_id = ?) AS limits
