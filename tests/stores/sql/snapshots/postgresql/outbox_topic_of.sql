SELECT idempotency_outbox.topic
FROM idempotency_outbox
WHERE idempotency_outbox.message_id = %(my_message_id)s::VARCHAR
