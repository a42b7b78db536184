DELETE FROM idempotency_quota WHERE (idempotency_quota.tenant_id, idempotency_quota.kind, idempotency_quota.bucket_end, idempotency_quota.window_length, idempotency_quota.shard) IN (SELECT chosen.tenant_id, chosen.kind, chosen.bucket_end, chosen.window_length, chosen.shard
FROM (SELECT idempotency_quota.tenant_id AS tenant_id, idempotency_quota.kind AS kind, idempotency_quota.bucket_end AS bucket_end, idempotency_quota.window_length AS window_length, idempotency_quota.shard AS shard
FROM idempotency_quota
WHERE idempotency_quota.bucket_end <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_quota.bucket_end <= coalesce(?, idempotency_quota.bucket_end)
 LIMIT ? OFFSET ?) AS chosen)
