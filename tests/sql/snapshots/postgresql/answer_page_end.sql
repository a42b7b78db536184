SELECT idempotency_records.rid
FROM idempotency_records
WHERE idempotency_records.rid > %(my_after)s ORDER BY idempotency_records.rid
 LIMIT 2 OFFSET %(my_limit)s::INTEGER - 1
