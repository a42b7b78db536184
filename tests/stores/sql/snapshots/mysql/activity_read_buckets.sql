SELECT idempotency_activity.bucket_start, idempotency_activity.counts
FROM idempotency_activity
WHERE idempotency_activity.owner = %(my_owner)s AND idempotency_activity.bucket_length = %(my_length)s AND idempotency_activity.bucket_start > (%(my_now)s - %(my_span)s) - %(my_length)s ORDER BY idempotency_activity.bucket_start
