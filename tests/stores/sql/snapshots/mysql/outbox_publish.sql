SELECT 1
FROM idempotency_outbox AS earlier
WHERE earlier.message_id = %(former_message_id)s OR earlier.message_id = %(my_sent_id)s AND earlier.sent_id IS NULL AND (earlier.namespace IS NULL OR earlier.namespace = %(my_namespace)s) AND earlier.tenant <=> %(plain_tenant)s
;
INSERT INTO idempotency_outbox (message_id, topic, `key`, tenant, tenant_id, headers, body, wrapping_key_id, data_key_number, namespace, sent_id, lane, digest, created_at, due_at, ready_at) SELECT %(my_message_id)s AS anon_1, %(my_topic)s AS anon_2, %(my_key)s AS anon_3, %(my_tenant)s AS anon_4, %(my_tenant_id)s AS anon_5, %(my_headers)s AS anon_6, %(my_body)s AS anon_7, %(my_wrapping_key_id)s AS anon_8, %(my_data_key_number)s AS anon_9, %(my_namespace)s AS anon_10, %(my_sent_id)s AS anon_11, %(my_lane)s AS anon_12, %(my_digest)s AS anon_13, moment.now, 9223372036854775807, moment.now + %(delay)s AS anon_14
FROM (SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now) AS moment
