WITH limits AS
(SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, %(my_max_records)s::BIGINT) AS records, coalesce(idempotency_tenants.limit_bytes, %(my_max_bytes)s::BIGINT) AS bytes, coalesce(idempotency_tenants.limit_in_flight, %(my_max_in_flight)s::BIGINT) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, %(my_max_new_keys)s::BIGINT) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE %(my_window_length)s::BIGINT END AS window_length
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tenant_id = %(my_tenant_id)s),
granted AS
(UPDATE idempotency_records SET state='processing', token=%(my_token)s, fence=greatest(nextval('idempotency_fence_numbers_number_seq'), idempotency_records.fence + 1), attempt=1, fingerprint=%(my_fingerprint)s, on_expiry=%(my_on_expiry)s::VARCHAR, tenant=%(my_tenant)s::VARCHAR, principal=%(my_principal)s::VARCHAR, method=%(my_method)s::VARCHAR, endpoint=%(my_endpoint)s::VARCHAR, requested_at=coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint), lease_expires_at=(coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) + %(lease)s::BIGINT), completed_at=NULL, expires_at=NULL, status=NULL, response_size=NULL, response=NULL, reason=NULL, in_quota=%(my_in_quota)s::SMALLINT, wrapping_key_id=NULL, data_key_number=NULL, succeeded=%(my_awaited)s::SMALLINT, steps=0, step_write=0, response_expires_at=NULL WHERE idempotency_records.record_id = (SELECT idempotency_records.record_id
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.state = %(seen_state)s::VARCHAR AND idempotency_records.token = %(seen_token)s AND idempotency_records.fence = %(seen_fence)s::BIGINT AND (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AND idempotency_records.expires_at >= idempotency_records.completed_at) FOR UPDATE SKIP LOCKED) AND (EXISTS (SELECT 1
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
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'new_keys' AND idempotency_quota.bucket_end = (limits.now / limits.window_length + 1) * limits.window_length AND idempotency_quota.window_length = limits.window_length) < limits.new_keys - %(my_margin)s::BIGINT)) THEN pg_try_advisory_xact_lock_shared(%(my_tenants_number)s::BIGINT) ELSE false END)) RETURNING idempotency_records.fence, idempotency_records.attempt),
into_window AS
(INSERT INTO idempotency_quota (tenant_id, kind, bucket_end, window_length, shard, records, bytes) SELECT %(my_tenant_id)s AS anon_1, 'new_keys', (limits.now / limits.window_length + 1) * limits.window_length AS anon_2, limits.window_length AS window_length, %(my_shard)s::SMALLINT AS anon_3, 1, 0
FROM granted JOIN limits ON true
WHERE limits.new_keys IS NOT NULL ON CONFLICT (tenant_id, kind, bucket_end, window_length, shard) DO UPDATE SET records = idempotency_quota.records + excluded.records, bytes = idempotency_quota.bytes + excluded.bytes )
 SELECT granted.fence, granted.attempt
FROM granted
