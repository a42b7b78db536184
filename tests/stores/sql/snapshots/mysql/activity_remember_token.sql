INSERT INTO idempotency_activity_tokens (token, expires_at) SELECT %(my_token)s AS anon_1, moment.now + 600000000 AS anon_2
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment
WHERE 1 = 1
;
SELECT idempotency_activity_tokens.expires_at - 600000000 AS now
FROM idempotency_activity_tokens
WHERE idempotency_activity_tokens.token = %(my_token)s
