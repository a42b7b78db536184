UPDATE idempotency_tasks SET locked_by=NULL, lock_expires_at=NULL WHERE idempotency_tasks.name = ? AND idempotency_tasks.locked_by = ?
