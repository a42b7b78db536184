INSERT INTO idempotency_records (rid, tid, state, fence, token, fingerprint, on_lapse, tenant, principal, method, operation, counted, attempt, requested_at, lease_until) SELECT %(my_rid)s AS anon_1, %(my_tid)s AS anon_2, 'processing', nextval('idempotency_fence_numbers_number_seq') AS next_value_1, %(my_token)s AS anon_3, %(my_fingerprint)s AS anon_4, %(my_on_lapse)s::VARCHAR AS anon_5, %(my_tenant)s::VARCHAR AS anon_6, %(my_principal)s::VARCHAR AS anon_7, %(my_method)s::VARCHAR AS anon_8, %(my_operation)s::VARCHAR AS anon_9, %(my_counted)s::SMALLINT AS anon_10, 1, moment.now, moment.now + %(lease)s::BIGINT AS anon_11
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS patience) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s)) ON CONFLICT (rid) DO NOTHING  RETURNING idempotency_records.fence
