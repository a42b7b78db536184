SELECT (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) + (SELECT CAST(coalesce(sum(idempotency_quota.records), 0) AS SIGNED INTEGER) AS coalesce_1
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > moment.now) AS records, (SELECT CAST(coalesce(sum(idempotency_quota.bytes), 0) AS SIGNED INTEGER) AS coalesce_2
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > moment.now) + (SELECT CAST(coalesce(sum(idempotency_steps.payload_size), 0) AS SIGNED INTEGER) AS coalesce_3
FROM idempotency_steps INNER JOIN idempotency_records AS others ON others.record_id = idempotency_steps.record_id AND others.requested_at = idempotency_steps.requested_at
WHERE idempotency_steps.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL) AS bytes, (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tenant_id = %(my_tenant_id)s AND others.in_quota = 1 AND others.lease_expires_at IS NOT NULL AND others.lease_expires_at > moment.now AND others.state = 'processing') AS in_flight, (SELECT CAST(coalesce(max(windows.`keys`), 0) AS SIGNED INTEGER) AS coalesce_4
FROM (SELECT sum(idempotency_quota.records) AS `keys`
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'new_keys' AND idempotency_quota.bucket_end > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) GROUP BY idempotency_quota.bucket_end, idempotency_quota.window_length) AS windows) AS new_keys
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment
