SELECT limits.now, limits.records AS max_records, limits.bytes AS max_bytes, limits.in_flight AS max_in_flight, limits.new_keys AS max_new_keys, limits.window_length AS max_window_length, (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) AS unsettled, (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > limits.now AND others.state = 'processing') AS in_flight, (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS SIGNED INTEGER) AS coalesce_1
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) AS records, (SELECT CAST(coalesce(sum(idempotency_quota.bytes), 0) AS SIGNED INTEGER) AS coalesce_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) + CASE WHEN (limits.bytes IS NOT NULL) THEN (SELECT CAST(coalesce(sum(idempotency_steps.payload_size), 0) AS SIGNED INTEGER) AS coalesce_3
FROM idempotency_steps INNER JOIN idempotency_records AS others ON others.record_id = idempotency_steps.record_id AND others.requested_at = idempotency_steps.requested_at
WHERE idempotency_steps.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) ELSE 0 END AS bytes, (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS SIGNED INTEGER) AS coalesce_4
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'new_keys' AND idempotency_quota.bucket_end = (limits.now DIV limits.window_length + 1) * limits.window_length AND idempotency_quota.window_length = limits.window_length) AS new_keys, (SELECT min(others.lease_expires_at) AS min_1
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > limits.now AND others.state = 'processing') AS first_lease, (SELECT min(idempotency_quota.bucket_end) AS min_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > limits.now) AS first_bucket_end, EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s) AS known
FROM (SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, %(my_max_records)s) AS records, coalesce(idempotency_tenants.limit_bytes, %(my_max_bytes)s) AS bytes, coalesce(idempotency_tenants.limit_in_flight, %(my_max_in_flight)s) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, %(my_max_new_keys)s) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE %(my_window_length)s END AS window_length
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tenant_id = %(my_tenant_id)s) AS limits
