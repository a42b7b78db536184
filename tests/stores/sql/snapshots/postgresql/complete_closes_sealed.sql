WITH done AS
(UPDATE idempotency_records SET state=%(my_state)s::VARCHAR, lease_expires_at=NULL, completed_at=greatest(moment.now, idempotency_records.requested_at), expires_at=(greatest(moment.now, idempotency_records.requested_at) + %(keep)s::BIGINT), status=%(my_status)s::SMALLINT, response_size=%(my_response_size)s::BIGINT, response=%(my_response)s, reason=NULL, wrapping_key_id=%(my_wrapping_key_id)s::VARCHAR, data_key_number=%(my_data_key_number)s::INTEGER, succeeded=CASE WHEN (idempotency_records.state = 'processing' AND idempotency_records.succeeded = 1) THEN CAST(nullif(CAST(pg_notify('flask_idempotency', encode(idempotency_records.record_id, 'hex')) AS TEXT), '') AS SMALLINT) END, resolver_due_at=0, steps=0, step_write=0 FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '2000', true) AS lock_timeout, %(my_record_id)s AS record_id) AS moment WHERE idempotency_records.record_id = %(my_record_id)s AND idempotency_records.record_id = moment.record_id AND idempotency_records.token = %(my_token)s AND idempotency_records.state IN ('processing', 'quarantined') AND idempotency_records.in_quota = 0 AND (EXISTS (SELECT 1
FROM idempotency_data_keys
WHERE idempotency_data_keys.tenant_id = idempotency_records.tenant_id AND idempotency_data_keys.number = %(my_data_key_number)s::INTEGER AND idempotency_data_keys.disabled_at IS NULL)) AND NOT (EXISTS (SELECT 1
FROM idempotency_tenants
WHERE idempotency_tenants.tenant_id = idempotency_records.tenant_id AND idempotency_tenants.erased_at >= idempotency_records.requested_at)) RETURNING idempotency_records.fence, idempotency_records.record_id AS _record_id),
closed AS
(DELETE FROM idempotency_steps USING done WHERE idempotency_steps.record_id = done._record_id)
 SELECT done.fence
FROM done
