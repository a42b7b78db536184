SELECT idempotency_records.record_id
FROM idempotency_records
WHERE idempotency_records.record_id > %(my_after)s ORDER BY idempotency_records.record_id
 LIMIT %(my_limit_less_one)s, 2
