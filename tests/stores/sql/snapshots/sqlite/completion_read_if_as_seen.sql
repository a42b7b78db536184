SELECT idempotency_records.in_quota, idempotency_records.expires_at, idempotency_records.response_size
FROM idempotency_records
WHERE idempotency_records.record_id = ? AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_records.state = ? AND idempotency_records.status = ? AND idempotency_records.response_size = ? AND idempotency_records.wrapping_key_id IS ? AND idempotency_records.data_key_number IS ? AND idempotency_records.response = ?
