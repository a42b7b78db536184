WITH limits AS
(SELECT moment.now AS now, coalesce(idempotency_tenants.limit_records, %(my_max_records)s::BIGINT) AS records, coalesce(idempotency_tenants.limit_bytes, %(my_max_bytes)s::BIGINT) AS bytes, coalesce(idempotency_tenants.limit_in_flight, %(my_max_in_flight)s::BIGINT) AS in_flight, coalesce(idempotency_tenants.limit_new_keys, %(my_max_new_keys)s::BIGINT) AS new_keys, CASE WHEN (idempotency_tenants.limit_new_keys IS NOT NULL) THEN idempotency_tenants.limit_window ELSE %(my_span)s::BIGINT END AS span
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now) AS moment LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tid = %(my_tid)s),
granted AS
(INSERT INTO idempotency_records (rid, tid, state, fence, token, fingerprint, on_lapse, tenant, principal, method, operation, counted, attempt, requested_at, lease_until) SELECT %(my_rid)s AS anon_4, %(my_tid)s AS anon_5, 'processing', nextval('idempotency_fence_numbers_number_seq') AS next_value_1, %(my_token)s AS anon_6, %(my_fingerprint)s AS anon_7, %(my_on_lapse)s::VARCHAR AS anon_8, %(my_tenant)s::VARCHAR AS anon_9, %(my_principal)s::VARCHAR AS anon_10, %(my_method)s::VARCHAR AS anon_11, %(my_operation)s::VARCHAR AS anon_12, %(my_counted)s::SMALLINT AS anon_13, 1, moment.now AS now, moment.now + %(lease)s::BIGINT AS anon_14
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS patience) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s)) AND (EXISTS (SELECT 1
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
WHERE idempotency_ledger.tid = %(my_tid)s AND idempotency_ledger.kind = 'keys' AND idempotency_ledger.edge = (limits.now / limits.span + 1) * limits.span AND idempotency_ledger.span = limits.span) < limits.new_keys - %(my_margin)s::BIGINT)) THEN pg_try_advisory_xact_lock_shared(%(my_tenants_number)s::BIGINT) ELSE false END)) ON CONFLICT (rid) DO NOTHING  RETURNING idempotency_records.fence),
into_window AS
(INSERT INTO idempotency_ledger (tid, kind, edge, span, shard, records, bytes) SELECT %(my_tid)s AS anon_1, 'keys', (limits.now / limits.span + 1) * limits.span AS anon_2, limits.span AS span, %(my_shard)s::SMALLINT AS anon_3, 1, 0
FROM granted JOIN limits ON true
WHERE limits.new_keys IS NOT NULL ON CONFLICT (tid, kind, edge, span, shard) DO UPDATE SET records = idempotency_ledger.records + excluded.records, bytes = idempotency_ledger.bytes + excluded.bytes )
 SELECT granted.fence
FROM granted
