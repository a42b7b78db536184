UPDATE idempotency_tenants SET last_key_number=? WHERE idempotency_tenants.tenant_id = ? AND idempotency_tenants.last_key_number = ? AND ? > ? AND (SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'store') = ? RETURNING last_key_number
