UPDATE idempotency_records SET state=?, lease_until=NULL, completed_at=max(coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)), idempotency_records.requested_at), expires_at=(max(coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)), idempotency_records.requested_at) + ?), status=?, byte_size=?, answer=?, reason=NULL, key_id=?, data_key=?, succeeded=NULL, ask_at=0 WHERE idempotency_records.rid = ? AND idempotency_records.token = ? AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.counted = 0 AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tid = idempotency_records.tid AND idempotency_data_keys.number = ? AND idempotency_data_keys.closed_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tid = idempotency_records.tid AND idempotency_tenants.erased_at >= idempotency_records.requested_at)) RETURNING fence
