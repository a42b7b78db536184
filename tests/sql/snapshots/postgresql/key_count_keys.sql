SELECT idempotency_data_keys.kid, count(*) AS keys_
FROM idempotency_data_keys GROUP BY idempotency_data_keys.kid
