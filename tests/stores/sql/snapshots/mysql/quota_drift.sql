WITH moment AS
(SELECT coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))) AS now)
 SELECT both_.bucket_end, CAST(sum(both_.records) AS SIGNED INTEGER) AS records, CAST(sum(both_.bytes) AS SIGNED INTEGER) AS bytes
FROM (SELECT idempotency_quota.bucket_end AS bucket_end, idempotency_quota.records AS records, idempotency_quota.bytes AS bytes
FROM idempotency_quota
WHERE idempotency_quota.tenant_id = %(my_tenant_id)s AND idempotency_quota.kind = 'responses' AND idempotency_quota.bucket_end > (SELECT moment.now
FROM moment) UNION ALL SELECT idempotency_records.expires_at AS expires_at, -1 AS anon_1, CASE WHEN coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) THEN 0 ELSE -idempotency_records.response_size END AS anon_2
FROM idempotency_records
WHERE idempotency_records.tenant_id = %(my_tenant_id)s AND idempotency_records.in_quota = 1 AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > (SELECT moment.now
FROM moment) UNION ALL SELECT idempotency_records.response_expires_at AS response_expires_at, 0, -idempotency_records.response_size AS anon_3
FROM idempotency_records
WHERE coalesce(idempotency_records.response_expires_at >= idempotency_records.completed_at, false) = 1 AND idempotency_records.response_expires_at > (SELECT moment.now
FROM moment) AND idempotency_records.tenant_id = %(my_tenant_id)s AND idempotency_records.in_quota = 1 AND idempotency_records.state IN ('completed', 'failed') AND idempotency_records.expires_at > (SELECT moment.now
FROM moment)) AS both_ GROUP BY both_.bucket_end
HAVING CAST(sum(both_.records) AS SIGNED INTEGER) != 0 OR CAST(sum(both_.bytes) AS SIGNED INTEGER) != 0
