INSERT INTO idempotency_audit (token, record_id, tenant_id, verb, was, actor, reason, certain, changed_at, expires_at) SELECT %(my_token)s AS anon_1, %(my_record_id)s AS anon_2, %(my_tenant_id)s AS anon_3, %(my_verb)s::VARCHAR AS anon_4, %(my_was)s::VARCHAR AS anon_5, %(my_actor)s::VARCHAR AS anon_6, %(my_reason)s::VARCHAR AS anon_7, %(my_certain)s::SMALLINT AS anon_8, moment.now, moment.now + 34560000000000 AS anon_9
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now) AS moment
WHERE 1 = 1 ON CONFLICT (token) DO NOTHING
