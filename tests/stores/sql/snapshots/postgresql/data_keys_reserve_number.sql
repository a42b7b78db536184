UPDATE idempotency_tenants SET last_key_number=%(my_number)s::INTEGER WHERE idempotency_tenants.tenant_id = %(my_tenant_id)s AND idempotency_tenants.last_key_number = %(my_after)s::INTEGER AND %(my_number)s::INTEGER > %(my_after)s::INTEGER AND (SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'store') = %(my_store)s::BIGINT RETURNING idempotency_tenants.last_key_number
