INSERT INTO idempotency_tenants (tenant_id, last_key_number, shredded_key_number) SELECT %(my_tenant_id)s AS anon_1, 0, 0 FROM DUAL
WHERE 1 = 1
