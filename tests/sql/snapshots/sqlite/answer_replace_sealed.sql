UPDATE idempotency_records SET state=?, status=?, byte_size=?, answer=?, key_id=?, data_key=? WHERE idempotency_records.rid = ? AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_records.state = ? AND idempotency_records.status = ? AND idempotency_records.byte_size = ? AND idempotency_records.key_id IS ? AND idempotency_records.data_key IS ? AND idempotency_records.answer = ? AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tid = idempotency_records.tid AND idempotency_data_keys.number = ? AND idempotency_data_keys.closed_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tid = idempotency_records.tid AND idempotency_tenants.erased_at >= idempotency_records.requested_at)) RETURNING fence
