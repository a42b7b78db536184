SELECT count(*) AS completed
FROM idempotency_records
WHERE idempotency_records.expires_at IS NOT NULL
