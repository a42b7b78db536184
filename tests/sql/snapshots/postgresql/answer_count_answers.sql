SELECT coalesce(idempotency_records.key_id, '') AS kid, count(*) AS answers
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') GROUP BY coalesce(idempotency_records.key_id, '')
