SELECT count(*) AS count_1
FROM idempotency_audit
WHERE idempotency_audit.actor = %(my_actor)s AND idempotency_audit.changed_at > coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) - %(my_span)s
