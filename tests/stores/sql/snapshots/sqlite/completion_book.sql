INSERT INTO idempotency_quota (tenant_id, kind, bucket_end, window_length, shard, records, bytes) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7
WHERE 1 = 1 ON CONFLICT (tenant_id, kind, bucket_end, window_length, shard) DO UPDATE SET records = idempotency_quota.records + excluded.records, bytes = idempotency_quota.bytes + excluded.bytes
