SELECT idempotency_outbox.seq
FROM idempotency_outbox
WHERE idempotency_outbox.published_at <= %(until)s AND (idempotency_outbox.namespace IS NULL OR idempotency_outbox.namespace IN (__[POSTCOMPILE_namespaces])) ORDER BY idempotency_outbox.published_at
 LIMIT %(limit)s FOR UPDATE
;
DELETE FROM idempotency_outbox WHERE idempotency_outbox.seq IN (__[POSTCOMPILE_my_chosen])
