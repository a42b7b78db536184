WITH done AS
(UPDATE idempotency_records SET state=%(my_state)s::VARCHAR, token=%(my_token)s, lease_until=NULL, completed_at=greatest(moment.now, idempotency_records.requested_at), expires_at=CASE WHEN (idempotency_records.counted = 1) THEN (((greatest(moment.now, idempotency_records.requested_at) + %(keep)s::BIGINT + %(width)s::BIGINT) - 1) / %(width)s::BIGINT) * %(width)s::BIGINT ELSE greatest(moment.now, idempotency_records.requested_at) + %(keep)s::BIGINT END, status=%(my_status)s::SMALLINT, byte_size=%(my_byte_size)s::BIGINT, answer=%(my_answer)s, reason=NULL, key_id=%(my_key_id)s::VARCHAR, data_key=%(my_data_key)s::INTEGER, succeeded=NULL, ask_at=0 FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS patience, %(my_rid)s AS rid) AS moment WHERE idempotency_records.rid = moment.rid AND idempotency_records.state IN (%(seen_state)s::VARCHAR, %(seen_other)s::VARCHAR) AND idempotency_records.token = %(seen_token)s AND coalesce(idempotency_records.lease_until, idempotency_records.expires_at) = %(seen_deadline)s::BIGINT AND idempotency_records.state = 'quarantined' AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tid = idempotency_records.tid AND idempotency_data_keys.number = %(my_data_key)s::INTEGER AND idempotency_data_keys.closed_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tid = idempotency_records.tid AND idempotency_tenants.erased_at >= idempotency_records.requested_at)) RETURNING idempotency_records.fence, idempotency_records.tid AS _tid, idempotency_records.counted AS _counted, idempotency_records.expires_at AS _expires_at, idempotency_records.byte_size AS _byte_size),
into_ledger AS
(INSERT INTO idempotency_ledger (tid, kind, edge, span, shard, records, bytes) SELECT done._tid AS _tid, 'answers', done._expires_at AS _expires_at, 0, %(my_shard)s::SMALLINT AS anon_1, 1, done._byte_size AS _byte_size
FROM done
WHERE done._counted = 1 ON CONFLICT (tid, kind, edge, span, shard) DO UPDATE SET records = idempotency_ledger.records + excluded.records, bytes = idempotency_ledger.bytes + excluded.bytes )
 SELECT done.fence
FROM done
