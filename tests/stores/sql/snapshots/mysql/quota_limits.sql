SELECT idempotency_tenants.limit_records AS records, idempotency_tenants.limit_bytes AS bytes, idempotency_tenants.limit_in_flight AS in_flight, idempotency_tenants.limit_new_keys AS new_keys, idempotency_tenants.limit_window AS `window`
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = %(my_tenant_id)s
