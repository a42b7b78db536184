SELECT idempotency_facts.value AS store, coalesce(idempotency_tenants.last_key, 0) AS last, idempotency_data_keys.number, idempotency_data_keys.kid, idempotency_data_keys.wrapped, coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) - idempotency_data_keys.closed_at AS closed_for
FROM idempotency_facts LEFT OUTER JOIN idempotency_tenants ON idempotency_tenants.tid = ? LEFT OUTER JOIN idempotency_data_keys ON idempotency_data_keys.tid = ?
WHERE idempotency_facts.name = 'store' ORDER BY idempotency_data_keys.number
