SELECT DISTINCT idempotency_steps.record_id
FROM idempotency_steps
WHERE idempotency_steps.record_id > %(my_after)s ORDER BY idempotency_steps.record_id
 LIMIT 2 OFFSET %(my_limit)s::INTEGER - 1
