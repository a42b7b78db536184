SELECT idempotency_activity.bucket_start, idempotency_activity.counts
FROM idempotency_activity
WHERE idempotency_activity.owner = %(my_owner)s AND idempotency_activity.bucket_length = %(my_length)s::BIGINT AND idempotency_activity.bucket_start > (%(my_now)s::BIGINT - %(my_span)s::BIGINT) - %(my_length)s::BIGINT ORDER BY idempotency_activity.bucket_start
