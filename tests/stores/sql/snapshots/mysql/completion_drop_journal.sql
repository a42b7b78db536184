DELETE FROM idempotency_steps WHERE idempotency_steps.record_id = %(my_record_id)s
