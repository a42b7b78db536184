UPDATE idempotency_activity SET counts=? WHERE idempotency_activity.owner = ? AND idempotency_activity.bucket_length = ? AND idempotency_activity.bucket_start = ?
