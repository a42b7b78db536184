UPDATE idempotency_tenants SET last_key=%(my_number)s::INTEGER WHERE idempotency_tenants.tid = %(my_tid)s AND %(my_number)s::INTEGER >= 1 AND (idempotency_tenants.last_key = %(my_number)s::INTEGER - 1 OR idempotency_tenants.last_key = 0) AND (SELECT idempotency_facts.value
FROM idempotency_facts
WHERE idempotency_facts.name = 'store') = %(my_store)s::BIGINT RETURNING idempotency_tenants.last_key
