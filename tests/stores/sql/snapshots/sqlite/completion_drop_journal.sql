DELETE FROM idempotency_steps WHERE idempotency_steps.record_id = ?
