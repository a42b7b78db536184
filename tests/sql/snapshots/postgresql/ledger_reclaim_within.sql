WITH limits AS
(SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, %(my_max_records)s::BIGINT) AS records, coalesce(idempotency_tenants.limit_bytes, %(my_max_bytes)s::BIGINT) AS bytes, coalesce(idempotency_tenants.limit_in_flight, %(my_max_in_flight)s::BIGINT) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, %(my_max_new_keys)s::BIGINT) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE %(my_span)s::BIGINT END AS span
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tid = %(my_tid)s),
granted AS
(UPDATE idempotency_records SET state='processing', token=%(my_token)s, fence=greatest(nextval('idempotency_fence_numbers_number_seq'), idempotency_records.fence + 1), attempt=1, fingerprint=%(my_fingerprint)s, on_lapse=%(my_on_lapse)s::VARCHAR, tenant=%(my_tenant)s::VARCHAR, principal=%(my_principal)s::VARCHAR, method=%(my_method)s::VARCHAR, operation=%(my_operation)s::VARCHAR, requested_at=coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint), lease_until=(coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) + %(lease)s::BIGINT), completed_at=NULL, expires_at=NULL, status=NULL, byte_size=NULL, answer=NULL, reason=NULL, counted=%(my_counted)s::SMALLINT, key_id=NULL, data_key=NULL, succeeded=NULL WHERE idempotency_records.rid = (SELECT idempotency_records.rid
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s AND idempotency_records.state = %(seen_state)s::VARCHAR AND idempotency_records.token = %(seen_token)s AND idempotency_records.fence = %(seen_fence)s::BIGINT AND (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AND idempotency_records.expires_at >= idempotency_records.completed_at) FOR UPDATE SKIP LOCKED) AND (EXISTS (SELECT 1
FROM limits
WHERE CASE WHEN ((limits.records - %(my_margin)s::BIGINT IS NULL OR (SELECT count(*) AS count_1
FROM idempotency_records AS others
WHERE others.tid = %(my_tid)s AND others.counted = 1 AND others.lease_until IS NOT NULL) + (SELECT CAST(coalesce(sum(idempotency_ledger.records), 0) AS BIGINT) AS coalesce_1
FROM idempotency_ledger
WHERE idempotency_ledger.tid = %(my_tid)s AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > limits.now) < limits.records - %(my_margin)s::BIGINT) AND (limits.bytes IS NULL OR (SELECT CAST(coalesce(sum(idempotency_ledger.bytes), 0) AS BIGINT) AS coalesce_2
FROM idempotency_ledger
WHERE idempotency_ledger.tid = %(my_tid)s AND idempotency_ledger.kind = 'answers' AND idempotency_ledger.edge > limits.now) < limits.bytes) AND (limits.in_flight - %(my_margin)s::BIGINT IS NULL OR (SELECT count(*) AS count_2
FROM idempotency_records AS others
WHERE others.tid = %(my_tid)s AND others.counted = 1 AND others.lease_until IS NOT NULL AND others.lease_until > limits.now AND others.state = 'processing') < limits.in_flight - %(my_margin)s::BIGINT) AND (limits.new_keys - %(my_margin)s::BIGINT IS NULL OR (SELECT CAST(coalesce(sum(idempotency_ledger.records), 0) AS BIGINT) AS coalesce_3
FROM idempotency_ledger
WHERE idempotency_ledger.tid = %(my_tid)s AND idempotency_ledger.kind = 'keys' AND idempotency_ledger.edge = (limits.now / limits.span + 1) * limits.span AND idempotency_ledger.span = limits.span) < limits.new_keys - %(my_margin)s::BIGINT)) THEN pg_try_advisory_xact_lock_shared(%(my_tenants_number)s::BIGINT) ELSE false END)) RETURNING idempotency_records.fence, idempotency_records.attempt),
into_window AS
(INSERT INTO idempotency_ledger (tid, kind, edge, span, shard, records, bytes) SELECT %(my_tid)s AS anon_1, 'keys', (limits.now / limits.span + 1) * limits.span AS anon_2, limits.span AS span, %(my_shard)s::SMALLINT AS anon_3, 1, 0
FROM granted JOIN limits ON true
WHERE limits.new_keys IS NOT NULL ON CONFLICT (tid, kind, edge, span, shard) DO UPDATE SET records = idempotency_ledger.records + excluded.records, bytes = idempotency_ledger.bytes + excluded.bytes )
 SELECT granted.fence, granted.attempt
FROM granted
