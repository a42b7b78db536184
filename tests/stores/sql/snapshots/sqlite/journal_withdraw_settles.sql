DELETE FROM idempotency_steps WHERE idempotency_steps.record_id = ? AND idempotency_steps.step_id = ? AND idempotency_steps.requested_at = ? AND idempotency_steps.state = 'begun'
