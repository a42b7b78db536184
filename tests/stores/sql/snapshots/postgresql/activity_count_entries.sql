SELECT count(*) AS count_1
FROM idempotency_audit
WHERE idempotency_audit.actor = %(my_actor)s::VARCHAR AND idempotency_audit.changed_at > coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) - %(my_span)s::BIGINT
