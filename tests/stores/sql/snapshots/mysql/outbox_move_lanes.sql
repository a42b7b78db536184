UPDATE idempotency_outbox SET namespace=%(my_namespace)s WHERE idempotency_outbox.namespace = %(former)s AND idempotency_outbox.published_at IS NULL AND idempotency_outbox.lane IS NOT NULL
