UPDATE idempotency_records SET state='quarantined', reason=? WHERE idempotency_records.record_id = ? AND idempotency_records.token = ? AND idempotency_records.state IN ('processing') RETURNING fence
