SELECT everybody.tenant_id
FROM (SELECT idempotency_quota.tenant_id AS tenant_id
FROM idempotency_quota UNION SELECT others.tenant_id AS tenant_id
FROM idempotency_records AS others
WHERE others.in_quota = 1 AND others.lease_expires_at IS NOT NULL UNION SELECT idempotency_tenants.tenant_id AS tenant_id
FROM idempotency_tenants
WHERE idempotency_tenants.limit_records IS NOT NULL OR idempotency_tenants.limit_bytes IS NOT NULL OR idempotency_tenants.limit_in_flight IS NOT NULL OR idempotency_tenants.limit_new_keys IS NOT NULL) AS everybody
