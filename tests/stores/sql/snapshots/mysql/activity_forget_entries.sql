DELETE FROM idempotency_audit WHERE idempotency_audit.tenant_id = %(my_tenant_id)s
