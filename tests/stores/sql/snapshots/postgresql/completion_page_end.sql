SELECT idempotency_records.record_id
FROM idempotency_records
WHERE idempotency_records.record_id > %(my_after)s ORDER BY idempotency_records.record_id
 LIMIT 2 OFFSET %(my_limit)s::INTEGER - 1
