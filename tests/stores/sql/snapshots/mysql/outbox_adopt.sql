UPDATE idempotency_outbox SET namespace=%(my_namespace)s, lane=%(my_lane)s WHERE idempotency_outbox.seq = %(my_seq)s AND idempotency_outbox.namespace IS NULL
