WITH chosen AS
(SELECT idempotency_quota.tenant_id AS tenant_id, idempotency_quota.kind AS kind, idempotency_quota.bucket_end AS bucket_end, idempotency_quota.window_length AS window_length, idempotency_quota.shard AS shard
FROM idempotency_quota
WHERE idempotency_quota.bucket_end <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AND idempotency_quota.bucket_end <= coalesce(%(my_horizon)s::BIGINT, idempotency_quota.bucket_end)
 LIMIT %(my_limit)s::BIGINT FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_quota WHERE (idempotency_quota.tenant_id, idempotency_quota.kind, idempotency_quota.bucket_end, idempotency_quota.window_length, idempotency_quota.shard) IN (SELECT chosen.tenant_id, chosen.kind, chosen.bucket_end, chosen.window_length, chosen.shard
FROM chosen)
