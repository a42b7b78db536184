INSERT INTO idempotency_tenants (tid, last_key, destroyed) SELECT %(my_tid)s AS anon_1, 0, 0
WHERE 1 = 1 ON CONFLICT (tid) DO NOTHING  RETURNING idempotency_tenants.tid
