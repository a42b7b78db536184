SELECT coalesce(idempotency_records.key_id, '') AS kid, count(*) AS answers
FROM idempotency_records
WHERE idempotency_records.state IN ('completed', 'failed') AND coalesce(idempotency_records.data_key, 1) != 0 GROUP BY coalesce(idempotency_records.key_id, '')
