UPDATE idempotency_records SET on_expiry='quarantine', lease_expires_at=greatest(idempotency_records.lease_expires_at, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) + %(lease)s), steps=%(my_steps)s, step_write=%(my_write)s WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.token = %(my_token)s AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.fence = %(my_fence)s AND idempotency_records.step_write < %(my_write)s AND (idempotency_records.state = 'processing' OR idempotency_records.reason = 'lease-expired')
;
SELECT idempotency_records.record_id, idempotency_records.tenant_id, idempotency_records.requested_at, idempotency_records.fence, idempotency_records.attempt, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s
