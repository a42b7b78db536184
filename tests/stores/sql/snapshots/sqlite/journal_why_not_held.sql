SELECT idempotency_records.state, idempotency_records.token, idempotency_records.fence, idempotency_records.step_write, idempotency_records.expires_at, idempotency_records.completed_at, idempotency_records.reason, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = ?
