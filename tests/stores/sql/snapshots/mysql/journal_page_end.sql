SELECT DISTINCT idempotency_steps.record_id
FROM idempotency_steps
WHERE idempotency_steps.record_id > %(my_after)s ORDER BY idempotency_steps.record_id
 LIMIT %(my_limit_less_one)s, 2
