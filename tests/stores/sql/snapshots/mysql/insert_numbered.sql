INSERT INTO idempotency_records (record_id, tenant_id, state, fence, token, fingerprint, on_expiry, tenant, principal, method, endpoint, in_quota, attempt, requested_at, lease_expires_at) SELECT %(my_record_id)s AS anon_1, %(my_tenant_id)s AS anon_2, 'processing', last_insert_id(nextval(idempotency_fence_numbers_number_seq)) AS last_insert_id_1, %(my_token)s AS anon_3, %(my_fingerprint)s AS anon_4, %(my_on_expiry)s AS anon_5, %(my_tenant)s AS anon_6, %(my_principal)s AS anon_7, %(my_method)s AS anon_8, %(my_endpoint)s AS anon_9, %(my_in_quota)s AS anon_10, 1, moment.now, moment.now + %(lease)s AS anon_11
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s))
