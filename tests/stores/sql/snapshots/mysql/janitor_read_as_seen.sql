SELECT idempotency_records.state, idempotency_records.token, idempotency_records.in_quota, idempotency_records.state IN (%(seen_state)s, %(seen_other)s) AND idempotency_records.token = %(seen_token)s AND coalesce(idempotency_records.lease_expires_at, idempotency_records.expires_at) = %(seen_deadline)s AND idempotency_records.state != 'released' AND (idempotency_records.expires_at IS NULL OR idempotency_records.expires_at > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))) AS unchanged
FROM idempotency_records
WHERE idempotency_records.record_id = %(my_record_id)s
