SELECT EXISTS (SELECT 1
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= ? AND idempotency_records.expires_at <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer))) AS anon_1
