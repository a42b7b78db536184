INSERT INTO idempotency_tenants (tid, last_key, destroyed) SELECT ? AS anon_1, 0, 0
WHERE 1 = 1 ON CONFLICT (tid) DO NOTHING  RETURNING tid
