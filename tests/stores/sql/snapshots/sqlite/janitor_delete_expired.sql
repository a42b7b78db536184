DELETE FROM idempotency_records WHERE idempotency_records.record_id IN (SELECT chosen.record_id
FROM (SELECT idempotency_records.record_id AS record_id
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= ? AND idempotency_records.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) ORDER BY idempotency_records.expires_at
 LIMIT ? OFFSET ?) AS chosen) AND (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= ? AND idempotency_records.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))
