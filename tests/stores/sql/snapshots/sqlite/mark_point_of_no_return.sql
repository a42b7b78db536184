UPDATE idempotency_records SET on_expiry='quarantine' WHERE idempotency_records.record_id = ? AND idempotency_records.token = ? AND idempotency_records.state IN ('processing') RETURNING fence
