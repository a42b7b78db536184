UPDATE idempotency_records SET state=%(my_state)s, lease_expires_at=NULL, completed_at=greatest(coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))), idempotency_records.requested_at), expires_at=CASE WHEN (idempotency_records.in_quota = 1) THEN (((greatest(coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))), idempotency_records.requested_at) + %(keep)s + %(width)s) - 1) DIV %(width)s) * %(width)s ELSE greatest(coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))), idempotency_records.requested_at) + %(keep)s END, status=%(my_status)s, response_size=%(my_response_size)s, response=%(my_response)s, reason=NULL, wrapping_key_id=%(my_wrapping_key_id)s, data_key_number=%(my_data_key_number)s, succeeded=NULL, resolver_due_at=0 WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.token = %(my_token)s AND idempotency_records.state IN ('processing', 'quarantined') AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_records.tenant_id AND idempotency_data_keys.number = %(my_data_key_number)s AND idempotency_data_keys.disabled_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_records.tenant_id AND idempotency_tenants.erased_at >= idempotency_records.requested_at))
;
SELECT idempotency_records.fence, idempotency_records.tenant_id, idempotency_records.in_quota, idempotency_records.expires_at, idempotency_records.response_size
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s
