DELETE FROM idempotency_steps WHERE idempotency_steps.record_id = %(my_record_id)s AND idempotency_steps.requested_at = %(my_requested_at)s
