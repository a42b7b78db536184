UPDATE idempotency_meta SET value=last_insert_id(greatest(idempotency_meta.value + 1, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))))) WHERE idempotency_meta.name = 'fence'
;
INSERT INTO idempotency_meta (name, value) SELECT 'fence', last_insert_id(greatest(coalesce((SELECT idempotency_meta.value
FROM idempotency_meta
WHERE idempotency_meta.name = 'fence'), (SELECT max(idempotency_records.fence) AS max_1
FROM idempotency_records), 0) + 1, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))))) AS last_insert_id_1
;
UPDATE idempotency_meta SET value=last_insert_id(greatest(idempotency_meta.value + 1, coalesce(%(now)s, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))))) WHERE idempotency_meta.name = 'fence'
