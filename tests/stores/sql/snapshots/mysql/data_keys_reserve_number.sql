UPDATE idempotency_tenants SET last_key_number=%(my_number)s WHERE idempotency_tenants.tenant_id = %(my_tenant_id)s AND idempotency_tenants.last_key_number = %(my_after)s AND %(my_number)s > %(my_after)s AND (SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'store') = %(my_store)s
