SELECT pg_advisory_xact_lock(%(my_tenants_number)s::BIGINT) AS locked
FROM (SELECT coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AS now, set_config('lock_timeout', '100', true) AS lock_timeout) AS moment
