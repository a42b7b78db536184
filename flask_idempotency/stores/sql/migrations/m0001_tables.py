"""The tables, their indexes, a number for the store, and where fences come from."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step

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

_INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS idempotency_stale ON idempotency_records (lease_until) WHERE state = 'processing'",
    "CREATE INDEX IF NOT EXISTS idempotency_expiry ON idempotency_records (expires_at) WHERE expires_at IS NOT NULL",
)

_COMMENTS: Final = (
    "COMMENT ON TABLE idempotency_records IS 'One row for each idempotency key. Written by flask_idempotency only.'",
    "COMMENT ON COLUMN idempotency_records.rid IS 'HMAC of scope and client key: leads back to neither'",
    "COMMENT ON COLUMN idempotency_records.tid IS 'HMAC of namespace and tenant'",
    "COMMENT ON COLUMN idempotency_records.token IS 'random, one for each claim; compared, never ordered'",
    "COMMENT ON COLUMN idempotency_records.fence IS 'rises with every claim, for ever'",
    "COMMENT ON COLUMN idempotency_records.on_lapse IS 'what becomes of it when its lease ends unsettled'",
    "COMMENT ON COLUMN idempotency_records.operation IS 'the route, by its endpoint'",
    "COMMENT ON COLUMN idempotency_records.lease_until IS 'while processing or quarantined'",
    "COMMENT ON COLUMN idempotency_records.expires_at IS"
    " 'never set while processing or quarantined: time does not end those'",
    "COMMENT ON COLUMN idempotency_records.byte_size IS 'of the plain answer: what quotas count'",
    "COMMENT ON COLUMN idempotency_records.answer IS 'status, headers and body, as the codec sealed them'",
    "COMMENT ON COLUMN idempotency_records.reason IS 'why it is quarantined'",
    "COMMENT ON TABLE idempotency_facts IS"
    " 'The schema''s version, the store''s own number, and the last fence where there are no sequences.'",
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
    "CREATE SEQUENCE IF NOT EXISTS idempotency_fences AS BIGINT",
    # A session that fetches numbers in advance hands a later claim a lower fence. Until we commit, this statement also
    # keeps everybody from taking one: setval could otherwise fall below a fence that was granted in the meantime.
    "ALTER SEQUENCE idempotency_fences CACHE 1",
    # From the clock and not from one, so that fences rise even over tables that were dropped and made anew.
    "SELECT setval('idempotency_fences', clock.us) FROM idempotency_fences AS fences,"
    " (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS clock"
    " WHERE fences.last_value < clock.us",
)

_SQLITE_FENCES: Final = (
    "INSERT INTO idempotency_facts (name, value)"
    " VALUES ('fence', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value < excluded.value",
)

STEP: Final = Step(
    number=1,
    what="idempotency_records and idempotency_facts with indexes, a number for the store, and the source of fences",
    statements={
        "postgresql": (
            _RECORDS.format(bytes="BYTEA"),
            _FACTS,
            *_INDEXES,
            *_COMMENTS,
            # A record is written twice and grows in between: room on the page keeps both versions there.
            # Answers arrive compressed; the server would only try again.
            "ALTER TABLE idempotency_records SET (fillfactor = 80), ALTER COLUMN answer SET STORAGE EXTERNAL",
            _POSTGRESQL_STORE,
            *_POSTGRESQL_FENCES,
        ),
        "sqlite": (_RECORDS.format(bytes="BLOB"), _FACTS, *_INDEXES, _SQLITE_STORE, *_SQLITE_FENCES),
    },
)
