UPDATE idempotency_tenants SET last_key=%(my_number)s::INTEGER WHERE idempotency_tenants.tid = %(my_tid)s AND idempotency_tenants.last_key = %(my_after)s::INTEGER AND %(my_number)s::INTEGER > %(my_after)s::INTEGER AND (SELECT idempotency_facts.value
FROM idempotency_facts
WHERE idempotency_facts.name = 'store') = %(my_store)s::BIGINT RETURNING idempotency_tenants.last_key
