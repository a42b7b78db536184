SELECT idempotency_activity.bucket_start, idempotency_activity.counts
FROM idempotency_activity
WHERE idempotency_activity.owner = ? AND idempotency_activity.bucket_length = ? AND idempotency_activity.bucket_start > (? - ?) - ? ORDER BY idempotency_activity.bucket_start
