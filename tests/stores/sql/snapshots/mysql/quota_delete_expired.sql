SELECT idempotency_quota.tenant_id, idempotency_quota.kind, idempotency_quota.bucket_end, idempotency_quota.window_length, idempotency_quota.shard
FROM idempotency_quota
WHERE idempotency_quota.bucket_end <= coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AND idempotency_quota.bucket_end <= coalesce(%(my_horizon)s, idempotency_quota.bucket_end)
 LIMIT %(my_limit)s FOR UPDATE SKIP LOCKED
;
DELETE FROM idempotency_quota WHERE (idempotency_quota.tenant_id, idempotency_quota.kind, idempotency_quota.bucket_end, idempotency_quota.window_length, idempotency_quota.shard) IN (__[POSTCOMPILE_my_chosen])
