UPDATE idempotency_facts SET value=max(idempotency_facts.value + 1, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) WHERE idempotency_facts.name = 'fence' RETURNING value
