"""The tables, their indexes, a number for the store, and where fences come from."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step, Where

_RECORDS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_records (
    rid {bytes} NOT NULL,
    tid {bytes} NOT NULL,
    state VARCHAR(11) NOT NULL,
    token {bytes} NOT NULL,
    fence BIGINT NOT NULL,
    attempt INTEGER NOT NULL,
    fingerprint {bytes} NOT NULL,
    on_lapse VARCHAR(10) NOT NULL,
    tenant TEXT NOT NULL,
    principal TEXT NOT NULL,
    method TEXT NOT NULL,
    operation TEXT NOT NULL,
    requested_at BIGINT NOT NULL,
    lease_until BIGINT,
    completed_at BIGINT,
    expires_at BIGINT,
    status SMALLINT,
    byte_size BIGINT,
    answer {bytes},
    reason TEXT,
    counted SMALLINT NOT NULL,
    key_id TEXT,
    data_key INTEGER,
    succeeded SMALLINT,
    ask_at BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (rid),
    CONSTRAINT idempotency_state CHECK (
        state IN ('processing', 'completed', 'failed', 'quarantined', 'released')
    ),
    CONSTRAINT idempotency_on_lapse CHECK (on_lapse IN ('takeover', 'quarantine')),
    CONSTRAINT idempotency_deadline CHECK (
        (state IN ('processing', 'quarantined') AND lease_until IS NOT NULL AND expires_at IS NULL)
        OR (state IN ('completed', 'failed', 'released') AND expires_at IS NOT NULL)
    ),
    CONSTRAINT idempotency_answer CHECK (
        NOT state IN ('completed', 'failed')
        OR (completed_at IS NOT NULL AND status IS NOT NULL AND byte_size IS NOT NULL AND answer IS NOT NULL)
    )
)"""

_FACTS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_facts (
    name VARCHAR(40) NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (name)
)"""

_TENANTS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_tenants (
    tid {bytes} NOT NULL,
    last_key INTEGER NOT NULL,
    destroyed INTEGER NOT NULL,
    erased_at BIGINT,
    limit_records BIGINT,
    limit_bytes BIGINT,
    limit_in_flight BIGINT,
    limit_new_keys BIGINT,
    limit_window BIGINT,
    PRIMARY KEY (tid)
)"""

_DATA_KEYS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_data_keys (
    tid {bytes} NOT NULL,
    number INTEGER NOT NULL,
    kid TEXT NOT NULL,
    wrapped {bytes} NOT NULL,
    made_at BIGINT NOT NULL,
    closed_at BIGINT,
    PRIMARY KEY (tid, number)
)"""

# Its rows are written again and again: with room on the page no index hears of it.
_LEDGER: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_ledger (
    tid {bytes} NOT NULL,
    kind VARCHAR(7) NOT NULL,
    edge BIGINT NOT NULL,
    span BIGINT NOT NULL,
    shard SMALLINT NOT NULL,
    records BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (tid, kind, edge, span, shard)
){storage}"""

_CHORES: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_chores (
    name VARCHAR(40) NOT NULL,
    noted_at BIGINT,
    report TEXT,
    holder {bytes},
    held_until BIGINT,
    PRIMARY KEY (name)
)"""

_FENCE_NUMBERS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_fence_numbers (
    number {serial} NOT NULL,
    PRIMARY KEY (number)
)"""

# A record is written twice and grows in between: room on the page keeps both versions there.
# Answers arrive compressed; the server would only try again.
_POSTGRESQL_STORAGE: Final = Where(
    # What an operator has set differently stays.
    "SELECT NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false) FROM pg_class"
    " WHERE oid = to_regclass('idempotency_records')",
    ("ALTER TABLE idempotency_records SET (fillfactor = 80), ALTER COLUMN answer SET STORAGE EXTERNAL",),
)
# Its rows are written again and again: with room on the page no index hears of it.
_POSTGRESQL_ROOM: Final = Where(
    "SELECT NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false) FROM pg_class"
    " WHERE oid = to_regclass('idempotency_ledger')",
    ("ALTER TABLE idempotency_ledger SET (fillfactor = 50)",),
)

_INDEXES: Final = {
    "idempotency_stale": "(lease_until) WHERE state = 'processing'",
    "idempotency_quarantined": "(ask_at, lease_until) WHERE state = 'quarantined'",
    "idempotency_expiry": "(expires_at) WHERE expires_at IS NOT NULL",
    "idempotency_unsettled": "(tid, lease_until) WHERE counted = 1 AND lease_until IS NOT NULL",
}


def _index(name: str) -> str:
    return f"CREATE INDEX IF NOT EXISTS {name} ON idempotency_records {_INDEXES[name]}"


def _postgresql_index(name: str) -> Where:
    # Even with IF NOT EXISTS it waits for all who write to the table, and everybody for it.
    look = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"  # noqa: S608 - our own words
        f" WHERE indrelid = to_regclass('idempotency_records') AND relname = '{name}')"
    )
    return Where(look, (_index(name),))


_TABLE_COMMENTS: Final = {
    "idempotency_records": "One row for each idempotency key. Written by flask_idempotency only.",
    "idempotency_facts": "The schema''s version, the store''s own number, and the last fence where there are no sequences.",
    "idempotency_tenants": "One row for each tenant that has had a data key or limits of its own.",
    "idempotency_data_keys": "What answers are sealed with, wrapped. A row that is gone erases every answer under it.",
    "idempotency_ledger": "What each tenant has, by when it will be over. Shards are added up: one may be below 0.",
    "idempotency_chores": "One row for each chore that a janitor was ever at.",
    "idempotency_fence_numbers": "Always empty: where there are sequences, fences come from the one of its key.",
}

_COLUMN_COMMENTS: Final = {
    "idempotency_records.rid": "HMAC of scope and client key: leads back to neither",
    "idempotency_records.tid": "HMAC of namespace and tenant",
    "idempotency_records.token": "random, one for each claim; compared, never ordered",
    "idempotency_records.fence": "rises with every claim, for ever",
    "idempotency_records.on_lapse": "what becomes of it when its lease ends unsettled",
    "idempotency_records.operation": "the route, by its endpoint",
    "idempotency_records.lease_until": "while processing or quarantined",
    "idempotency_records.expires_at": "never set while processing or quarantined: time does not end those",
    "idempotency_records.byte_size": "of the plain answer: what quotas count",
    "idempotency_records.answer": "status, headers and body, as the codec sealed them",
    "idempotency_records.reason": "why it is quarantined",
    "idempotency_records.counted": "1: it is in its tenant''s ledger",
    "idempotency_records.key_id": "of the key that wraps the data key; NULL: the answer is not encrypted",
    "idempotency_records.data_key": "number of the tenant''s data key; 0: the answer was erased",
    "idempotency_records.succeeded": "of an answer that cannot be opened, for its state says it no more",
    "idempotency_records.ask_at": "while quarantined: not before then a resolver is asked again",
    "idempotency_tenants.last_key": "the highest number that a data key was ever given",
    "idempotency_tenants.destroyed": "data keys up to this number can never be had again",
    "idempotency_tenants.erased_at": "answers of keys first used until then are told as erased",
    "idempotency_tenants.limit_window": "of limit_new_keys, in microseconds",
    "idempotency_data_keys.kid": "of the key that wraps it",
    "idempotency_data_keys.closed_at": "since when it opens what it has sealed, and seals no more",
    "idempotency_ledger.edge": "when it is over, all of it at once",
    "idempotency_ledger.span": "of a window, in microseconds",
    "idempotency_ledger.shard": "so that few wait for each other",
    "idempotency_chores.report": "of the last run, as JSON: numbers and words of ours",
    "idempotency_chores.holder": "who is at it; a lock that saves work, and no more",
}


def _table_comment(table: str) -> Where:
    words = _TABLE_COMMENTS[table]
    return Where(
        f"SELECT obj_description(to_regclass('{table}'), 'pg_class') IS DISTINCT FROM '{words}'",  # noqa: S608
        (f"COMMENT ON TABLE {table} IS '{words}'",),
    )


def _column_comment(name: str) -> Where:
    words, (table, _, column) = _COLUMN_COMMENTS[name], name.partition(".")
    return Where(
        f"SELECT col_description(attrelid, attnum) IS DISTINCT FROM '{words}' FROM pg_attribute"  # noqa: S608
        f" WHERE attrelid = to_regclass('{table}') AND attname = '{column}'",
        (f"COMMENT ON COLUMN {name} IS '{words}'",),
    )


# Random, so that no two databases have the same, and never changed: answers in a Redis that they share are told apart by
# it. In a version 4 UUID the first twelve digits and the last four are random, every bit of them.
_POSTGRESQL_STORE: Final = (
    "INSERT INTO idempotency_facts (name, value)"
    " SELECT 'store', ('x' || left(hex, 12) || right(hex, 4))::bit(64)::bigint & 9223372036854775807"
    " FROM replace(gen_random_uuid()::text, '-', '') AS hex"
    " ON CONFLICT (name) DO NOTHING"
)

_SQLITE_STORE: Final = (
    "INSERT INTO idempotency_facts (name, value) VALUES ('store', random() & 9223372036854775807)"
    " ON CONFLICT (name) DO NOTHING"
)

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
        # The clock passed this in 2001: whatever is below it counts from one.
        "SELECT seqcache <> 1 OR last_value < 1000000000000000 FROM pg_sequence, idempotency_fence_numbers_number_seq"
        " WHERE seqrelid = to_regclass('idempotency_fence_numbers_number_seq')",
        (
            # A session that fetches numbers in advance hands a later claim a lower fence. Until we commit, this statement
            # also keeps everybody from taking one: setval could otherwise fall below a fence that was granted meanwhile.
            "ALTER SEQUENCE idempotency_fence_numbers_number_seq CACHE 1",
            # From the clock and not from one, so that fences rise even over tables that were dropped and made anew.
            "SELECT setval('idempotency_fence_numbers_number_seq', clock.us)"
            " FROM idempotency_fence_numbers_number_seq AS fences,"
            " (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS clock"
            " WHERE fences.last_value < clock.us",
        ),
    ),
)

_SQLITE_FENCES: Final = (
    "INSERT INTO idempotency_facts (name, value)"
    " VALUES ('fence', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value < excluded.value",
)


def _tables(**words: str) -> list[str]:
    tables = (_RECORDS, _FACTS, _TENANTS, _DATA_KEYS, _LEDGER, _CHORES, _FENCE_NUMBERS)
    return [table.format(**words) for table in tables]


STEP: Final = Step(
    number=1,
    what="idempotency_records, _facts, _tenants, _data_keys, _ledger, _chores, _fence_numbers, and the store's number",
    statements={
        "postgresql": (
            *_tables(bytes="BYTEA", serial="BIGSERIAL", storage=" WITH (fillfactor = 50)"),
            # First, for it takes the strongest lock: who has less and asks for more may wait for others who wait for it.
            _POSTGRESQL_STORAGE,
            _POSTGRESQL_ROOM,
            *map(_postgresql_index, _INDEXES),
            *map(_table_comment, _TABLE_COMMENTS),
            *map(_column_comment, _COLUMN_COMMENTS),
            _POSTGRESQL_STORE,
            *_POSTGRESQL_FENCES,
        ),
        "sqlite": (
            *_tables(bytes="BLOB", serial="BIGINT", storage=""),
            *map(_index, _INDEXES),
            _SQLITE_STORE,
            *_SQLITE_FENCES,
        ),
    },
)
