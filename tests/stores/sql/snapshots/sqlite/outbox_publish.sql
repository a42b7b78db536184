INSERT INTO idempotency_outbox (message_id, topic, "key", tenant, tenant_id, headers, body, wrapping_key_id, data_key_number, namespace, sent_id, lane, digest, created_at, due_at, ready_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4, ? AS anon_5, ? AS anon_6, ? AS anon_7, ? AS anon_8, ? AS anon_9, ? AS anon_10, ? AS anon_11, ? AS anon_12, ? AS anon_13, moment.now, 9223372036854775807, moment.now + ? AS anon_14
FROM (SELECT coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AS now) AS moment
WHERE NOT (EXISTS (SELECT 1
FROM idempotency_outbox AS earlier
WHERE earlier.message_id = ? OR earlier.message_id = ? AND earlier.sent_id IS NULL AND (earlier.namespace IS NULL OR earlier.namespace = ?) AND earlier.tenant IS ?)) ON CONFLICT (message_id) DO NOTHING  RETURNING seq
