SELECT count(*) AS count_1
FROM idempotency_facts
WHERE idempotency_facts.name = 'cached_since'
