DELETE FROM idempotency_steps WHERE idempotency_steps.record_id = %(my_record_id)s AND idempotency_steps.step_id = %(my_step_id)s AND idempotency_steps.requested_at = %(my_requested_at)s AND NOT (EXISTS (SELECT 1
FROM idempotency_records
WHERE idempotency_records.record_id = idempotency_steps.record_id AND idempotency_records.requested_at = idempotency_steps.requested_at AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.response IS NULL))
