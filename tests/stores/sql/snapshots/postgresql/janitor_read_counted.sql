SELECT idempotency_records.completed_at, idempotency_records.expires_at, idempotency_records.response_expires_at, idempotency_records.response_size
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s FOR UPDATE
