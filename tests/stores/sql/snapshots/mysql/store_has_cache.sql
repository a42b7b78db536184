SELECT count(*) AS count_1
FROM idempotency_meta
WHERE idempotency_meta.name = 'cached_since'
