SELECT idempotency_activity.counts
FROM idempotency_activity
WHERE idempotency_activity.owner = %(my_owner)s AND idempotency_activity.bucket_length = %(my_length)s AND idempotency_activity.bucket_start = %(my_start)s FOR UPDATE
