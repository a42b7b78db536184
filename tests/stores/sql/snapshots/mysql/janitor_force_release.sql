UPDATE idempotency_records SET state='released', token=%(my_token)s, lease_expires_at=NULL, completed_at=NULL, expires_at=(coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) + 86400000000), status=NULL, response=NULL, reason=NULL, wrapping_key_id=NULL, data_key_number=NULL, succeeded=NULL, resolver_due_at=0, steps=0 WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.state IN (%(seen_state)s, %(seen_other)s) AND idempotency_records.token = %(seen_token)s AND coalesce(idempotency_records.lease_expires_at, idempotency_records.expires_at) = %(seen_deadline)s AND idempotency_records.state != 'released' AND (idempotency_records.expires_at IS NULL OR idempotency_records.expires_at > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))))
;
SELECT idempotency_records.in_quota, idempotency_records.response_size
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s
