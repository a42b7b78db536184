SELECT everybody.tid
FROM (SELECT idempotency_ledger.tid AS tid
FROM idempotency_ledger UNION SELECT others.tid AS tid
FROM idempotency_records AS others
WHERE others.counted = 1 AND others.lease_until IS NOT NULL UNION SELECT idempotency_tenants.tid AS tid
FROM idempotency_tenants
WHERE idempotency_tenants.limit_records IS NOT NULL OR idempotency_tenants.limit_bytes IS NOT NULL OR idempotency_tenants.limit_in_flight IS NOT NULL OR idempotency_tenants.limit_new_keys IS NOT NULL) AS everybody
