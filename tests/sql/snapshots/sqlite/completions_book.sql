INSERT INTO idempotency_ledger (tid, kind, edge, span, shard, records, bytes) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7
WHERE 1 = 1 ON CONFLICT (tid, kind, edge, span, shard) DO UPDATE SET records = idempotency_ledger.records + excluded.records, bytes = idempotency_ledger.bytes + excluded.bytes
