SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'store' FOR UPDATE
