SELECT DISTINCT idempotency_steps.record_id
FROM idempotency_steps
WHERE idempotency_steps.record_id > ? ORDER BY idempotency_steps.record_id
 LIMIT 2 OFFSET ? - 1
