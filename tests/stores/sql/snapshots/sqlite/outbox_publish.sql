INSERT INTO idempotency_outbox (message_id, topic, "key", tenant, tenant_id, headers, body, wrapping_key_id, data_key_number, created_at, due_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7, ? AS anon_8, ? AS anon_9, moment.now, moment.now + ? AS anon_10
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE moment.now IS NOT NULL ON CONFLICT (message_id) DO NOTHING  RETURNING seq
