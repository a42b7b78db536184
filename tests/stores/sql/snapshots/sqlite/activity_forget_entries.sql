DELETE FROM idempotency_audit WHERE idempotency_audit.tenant_id = ?
