SELECT idempotency_records.state, idempotency_records.in_quota, idempotency_records.completed_at, idempotency_records.expires_at, idempotency_records.response_expires_at, idempotency_records.response_size, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = ? AND idempotency_records.state != 'quarantined'
