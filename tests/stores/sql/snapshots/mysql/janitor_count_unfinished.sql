WITH moment AS
(SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now)
 SELECT processing.in_flight AS in_flight, processing.lapsed AS lapsed, (SELECT moment.now
FROM moment) - processing.first_lapsed AS lapsed_for, quarantined.quarantined AS quarantined, (SELECT moment.now
FROM moment) - quarantined.first_quarantined AS quarantined_for
FROM (SELECT coalesce(sum(CASE WHEN (idempotency_records.lease_expires_at <= (SELECT moment.now
FROM moment)) THEN 0 ELSE 1 END), 0) AS in_flight, coalesce(sum(CASE WHEN (idempotency_records.lease_expires_at <= (SELECT moment.now
FROM moment)) THEN 1 ELSE 0 END), 0) AS lapsed, min(CASE WHEN (idempotency_records.lease_expires_at <= (SELECT moment.now
FROM moment)) THEN greatest(idempotency_records.lease_expires_at, 0) END) AS first_lapsed
FROM idempotency_records
WHERE idempotency_records.state = 'processing' AND idempotency_records.lease_expires_at IS NOT NULL) AS processing INNER JOIN (SELECT count(*) AS quarantined, min(greatest(idempotency_records.lease_expires_at, 0)) AS first_quarantined
FROM idempotency_records
WHERE idempotency_records.state = 'quarantined' AND idempotency_records.lease_expires_at IS NOT NULL) AS quarantined ON 1 = 1
