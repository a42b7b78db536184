SELECT idempotency_meta.value AS store, coalesce((SELECT idempotency_tenants.last_key_number
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = %(my_tenant_id)s), 0) AS last, idempotency_data_keys.number, idempotency_data_keys.wrapping_key_id, idempotency_data_keys.wrapped_key, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) - idempotency_data_keys.disabled_at AS disabled_for
FROM idempotency_meta LEFT OUTER JOIN idempotency_data_keys ON idempotency_data_keys.tenant_id = %(my_tenant_id)s
WHERE idempotency_meta.name = 'store' ORDER BY idempotency_data_keys.number
