SELECT count(*) AS completed
FROM (SELECT 1 AS one
FROM idempotency_records
WHERE idempotency_records.expires_at IS NOT NULL AND idempotency_records.state IN ('completed', 'failed')
 LIMIT %(my_limit)s) AS some
