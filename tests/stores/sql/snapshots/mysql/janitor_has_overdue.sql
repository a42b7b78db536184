SELECT EXISTS (SELECT 1
FROM idempotency_records
WHERE (idempotency_records.state = 'released' OR idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at >= idempotency_records.completed_at) AND idempotency_records.expires_at <= %(my_horizon)s AND idempotency_records.expires_at <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))) AS anon_1
