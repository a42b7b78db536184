UPDATE idempotency_tenants SET last_key=? WHERE idempotency_tenants.tid = ? AND idempotency_tenants.last_key = ? AND ? > ? AND (SELECT idempotency_facts.value
FROM idempotency_facts
WHERE idempotency_facts.name = 'store') = ? RETURNING last_key
