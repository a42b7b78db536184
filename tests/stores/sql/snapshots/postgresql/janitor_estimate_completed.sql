SELECT (CASE WHEN reltuples >= 0 THEN (reltuples / nullif(relpages, 0) * pg_relation_size(oid) / current_setting('block_size')::integer)::bigint END - (SELECT count(*) AS count_1
FROM idempotency_records
WHERE idempotency_records.state = 'processing')) - (SELECT count(*) AS count_2
FROM idempotency_records
WHERE idempotency_records.state = 'quarantined') AS completed
FROM pg_class WHERE oid = to_regclass(%(my_table)s)
