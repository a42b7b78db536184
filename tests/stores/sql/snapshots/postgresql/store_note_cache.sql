INSERT INTO idempotency_meta (name, value) SELECT 'cached_since', coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS coalesce_1
WHERE 1 = 1 ON CONFLICT (name) DO NOTHING
