SELECT idempotency_records.counted, idempotency_records.expires_at, idempotency_records.byte_size
FROM idempotency_records
WHERE idempotency_records.rid = ? AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_records.state = ? AND idempotency_records.status = ? AND idempotency_records.byte_size = ? AND idempotency_records.key_id IS ? AND idempotency_records.data_key IS ? AND idempotency_records.answer = ?
