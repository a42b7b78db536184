INSERT INTO idempotency_activity_tokens (token, expires_at) SELECT %(my_token)s AS anon_1, moment.now + 600000000 AS anon_2
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS lock_timeout) AS moment
WHERE 1 = 1 ON CONFLICT (token) DO NOTHING  RETURNING idempotency_activity_tokens.expires_at - 600000000 AS now
