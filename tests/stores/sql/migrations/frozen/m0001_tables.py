"""Create the tables, their indexes, the store's number and the source of fences."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, Where, new_index, new_table

_RECORDS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_records (
    record_id {bytes} NOT NULL,
    tenant_id {bytes} NOT NULL,
    state VARCHAR(11) NOT NULL,
    token {bytes} NOT NULL,
    fence BIGINT NOT NULL,
    attempt INTEGER NOT NULL,
    fingerprint {bytes} NOT NULL,
    on_expiry VARCHAR(10) NOT NULL,
    tenant TEXT NOT NULL,
    principal TEXT NOT NULL,
    method TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    requested_at BIGINT NOT NULL,
    lease_expires_at BIGINT,
    completed_at BIGINT,
    expires_at BIGINT,
    status SMALLINT,
    response_size BIGINT,
    response {bytes},
    reason TEXT,
    in_quota SMALLINT NOT NULL,
    wrapping_key_id TEXT,
    data_key_number INTEGER,
    succeeded SMALLINT,
    resolver_due_at BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (record_id),
    CONSTRAINT idempotency_state CHECK (
        state IN ('processing', 'completed', 'failed', 'quarantined', 'released')
    ),
    CONSTRAINT idempotency_on_expiry CHECK (on_expiry IN ('takeover', 'quarantine')),
    CONSTRAINT idempotency_deadline CHECK (
        (state IN ('processing', 'quarantined') AND lease_expires_at IS NOT NULL AND expires_at IS NULL)
        OR (state IN ('completed', 'failed', 'released') AND expires_at IS NOT NULL)
    ),
    CONSTRAINT idempotency_response CHECK (
        NOT state IN ('completed', 'failed')
        OR (completed_at IS NOT NULL AND status IS NOT NULL AND response_size IS NOT NULL AND response IS NOT NULL)
    )
)"""

_META: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_meta (
    name VARCHAR(40) NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (name)
)"""

_TENANTS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_tenants (
    tenant_id {bytes} NOT NULL,
    last_key_number INTEGER NOT NULL,
    shredded_key_number INTEGER NOT NULL,
    erased_at BIGINT,
    limit_records BIGINT,
    limit_bytes BIGINT,
    limit_in_flight BIGINT,
    limit_new_keys BIGINT,
    limit_window BIGINT,
    PRIMARY KEY (tenant_id)
)"""

_DATA_KEYS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_data_keys (
    tenant_id {bytes} NOT NULL,
    number INTEGER NOT NULL,
    wrapping_key_id TEXT NOT NULL,
    wrapped_key {bytes} NOT NULL,
    created_at BIGINT NOT NULL,
    disabled_at BIGINT,
    PRIMARY KEY (tenant_id, number)
)"""

# Its rows are updated often: with free space on the page, an update touches no index.
_QUOTA: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_quota (
    tenant_id {bytes} NOT NULL,
    kind VARCHAR(9) NOT NULL,
    bucket_end BIGINT NOT NULL,
    window_length BIGINT NOT NULL,
    shard SMALLINT NOT NULL,
    records BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (tenant_id, kind, bucket_end, window_length, shard)
){storage}"""

_TASKS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_tasks (
    name VARCHAR(40) NOT NULL,
    reported_at BIGINT,
    report TEXT,
    locked_by {bytes},
    lock_expires_at BIGINT,
    PRIMARY KEY (name)
)"""

_FENCE_NUMBERS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_fence_numbers (
    number {serial} NOT NULL,
    PRIMARY KEY (number)
)"""

# A record is written twice and grows in between: free space on the page keeps both versions there.
# Responses arrive compressed, so the server need not try.
_POSTGRESQL_STORAGE: Final = Where(
    # A fillfactor that an operator has set stays.
    "SELECT NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false) FROM pg_class"
    " WHERE oid = to_regclass('idempotency_records')",
    ("ALTER TABLE idempotency_records SET (fillfactor = 80), ALTER COLUMN response SET STORAGE EXTERNAL",),
)
# Its rows are updated often: with free space on the page, an update touches no index.
_POSTGRESQL_QUOTA_STORAGE: Final = Where(
    "SELECT NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false) FROM pg_class"
    " WHERE oid = to_regclass('idempotency_quota')",
    ("ALTER TABLE idempotency_quota SET (fillfactor = 50)",),
)

_INDEXES: Final = {
    "idempotency_expired_leases": "(lease_expires_at) WHERE state = 'processing'",
    "idempotency_quarantined": "(resolver_due_at, lease_expires_at) WHERE state = 'quarantined'",
    "idempotency_expiry": "(expires_at) WHERE expires_at IS NOT NULL",
    "idempotency_unfinished": "(tenant_id, lease_expires_at) WHERE in_quota = 1 AND lease_expires_at IS NOT NULL",
}


# Random, so that no two databases have the same: it tells their responses apart in a Redis cache that they share. It never
# changes. In a version 4 UUID every bit of the first twelve digits and of the last four is random.
_STORE: Final = {
    "postgresql": (
        "INSERT INTO idempotency_meta (name, value)"
        " SELECT 'store', ('x' || left(hex, 12) || right(hex, 4))::bit(64)::bigint & 9223372036854775807"
        " FROM replace(gen_random_uuid()::text, '-', '') AS hex"
        " ON CONFLICT (name) DO NOTHING"
    ),
    "sqlite": (
        "INSERT INTO idempotency_meta (name, value) VALUES ('store', random() & 9223372036854775807)"
        " ON CONFLICT (name) DO NOTHING"
    ),
}

_POSTGRESQL_FENCES: Final = (
    Where(
        "SELECT to_regclass('idempotency_fence_numbers_number_seq') IS NULL",
        (
            "CREATE SEQUENCE idempotency_fence_numbers_number_seq AS BIGINT OWNED BY idempotency_fence_numbers.number",
            "ALTER TABLE idempotency_fence_numbers ALTER COLUMN number"
            " SET DEFAULT nextval('idempotency_fence_numbers_number_seq')",
        ),
    ),
    Where(
        # The clock passed this in 2001: a lower sequence counts from one.
        "SELECT seqcache <> 1 OR last_value < 1000000000000000 FROM pg_sequence, idempotency_fence_numbers_number_seq"
        " WHERE seqrelid = to_regclass('idempotency_fence_numbers_number_seq')",
        (
            # A session that caches numbers would give a later claim a lower fence. Until the commit, this statement also
            # locks the sequence: otherwise setval could go below a fence that another session takes now.
            "ALTER SEQUENCE idempotency_fence_numbers_number_seq CACHE 1",
            # From the clock and not from one, so that fences rise even over tables that were dropped and created again.
            "SELECT setval('idempotency_fence_numbers_number_seq', clock.us)"
            " FROM idempotency_fence_numbers_number_seq AS fences,"
            " (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS clock"
            " WHERE fences.last_value < clock.us",
        ),
    ),
)

_SQLITE_FENCES: Final = (
    "INSERT INTO idempotency_meta (name, value)"
    " VALUES ('fence', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value < excluded.value"
)

STEP: Final = Step(
    number=1,
    what="idempotency_records, _meta, _tenants, _data_keys, _quota, _tasks, _fence_numbers, and the store's number",
    parts=(
        *map(new_table, (_RECORDS, _META, _TENANTS, _DATA_KEYS)),
        new_table(_QUOTA, storage=(" WITH (fillfactor = 50)", "")),
        new_table(_TASKS),
        new_table(_FENCE_NUMBERS, serial=("BIGSERIAL", "BIGINT")),
        # First, because it takes the strongest lock: to raise a weaker lock later could end in a deadlock.
        {"postgresql": _POSTGRESQL_STORAGE},
        {"postgresql": _POSTGRESQL_QUOTA_STORAGE},
        *(new_index("idempotency_records", *each) for each in _INDEXES.items()),
        _STORE,
        *({"postgresql": each} for each in _POSTGRESQL_FENCES),
        {"sqlite": _SQLITE_FENCES},
    ),
)
