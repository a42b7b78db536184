SELECT NOT (NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tid = idempotency_records.tid AND idempotency_tenants.erased_at >= idempotency_records.requested_at))) AS erased, EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tid = idempotency_records.tid AND idempotency_data_keys.number = %(my_data_key)s::INTEGER AND idempotency_data_keys.closed_at IS NULL) AS kept
FROM idempotency_records
WHERE idempotency_records.rid = %(my_rid)s
