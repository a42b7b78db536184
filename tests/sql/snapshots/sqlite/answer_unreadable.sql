SELECT idempotency_records.state, idempotency_records.counted, idempotency_records.expires_at, idempotency_records.byte_size, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now
FROM idempotency_records
WHERE idempotency_records.rid = ? AND idempotency_records.state != 'quarantined'
