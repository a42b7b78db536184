UPDATE idempotency_tenants SET last_key=? WHERE idempotency_tenants.tid = ? AND ? >= 1 AND (idempotency_tenants.last_key = ? - 1 OR idempotency_tenants.last_key = 0) AND (SELECT idempotency_facts.value
FROM idempotency_facts
WHERE idempotency_facts.name = 'store') = ? RETURNING last_key
