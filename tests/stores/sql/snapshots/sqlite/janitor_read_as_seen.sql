SELECT idempotency_records.state, idempotency_records.token, idempotency_records.in_quota, idempotency_records.state IN (?, ?) AND idempotency_records.token = ? AND coalesce(idempotency_records.lease_expires_at, idempotency_records.expires_at) = ? AND idempotency_records.state != 'released' AND (idempotency_records.expires_at IS NULL OR idempotency_records.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) AS unchanged
FROM idempotency_records
WHERE idempotency_records.record_id = ?
