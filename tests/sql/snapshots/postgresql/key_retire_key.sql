DELETE FROM idempotency_data_keys WHERE idempotency_data_keys.tid = %(my_tid)s AND idempotency_data_keys.number = %(my_number)s::INTEGER AND idempotency_data_keys.closed_at IS NOT NULL
