"""Create the table of journals, and the columns that say of each record whether it has one."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import (
    Step,
    Where,
    column_comment,
    new_column,
    new_index,
    new_sqlite_column,
)

_COLUMNS: Final = {
    "steps": "SMALLINT DEFAULT 0 NOT NULL",
    "step_write": "INTEGER DEFAULT 0 NOT NULL",
}

_STEPS: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_steps (
    record_id {bytes} NOT NULL,
    step_id {bytes} NOT NULL,
    tenant_id {bytes} NOT NULL,
    requested_at BIGINT NOT NULL,
    position BIGINT NOT NULL,
    name VARCHAR(64) NOT NULL,
    effects VARCHAR(13) NOT NULL,
    state VARCHAR(8) NOT NULL,
    in_line SMALLINT NOT NULL,
    kept SMALLINT NOT NULL,
    fence BIGINT NOT NULL,
    digest {bytes} NOT NULL,
    took BIGINT NOT NULL,
    began_at BIGINT NOT NULL,
    finished_at BIGINT,
    payload_size BIGINT NOT NULL,
    payload {bytes},
    wrapping_key_id TEXT,
    data_key_number INTEGER,
    PRIMARY KEY (record_id, step_id),
    CONSTRAINT idempotency_step_state CHECK (state IN ('begun', 'finished')),
    CONSTRAINT idempotency_step_effects CHECK (effects IN ('plain', 'deduplicated', 'transactional', 'pure'))
)"""

_INDEX: Final = "CREATE INDEX IF NOT EXISTS idempotency_steps_of_tenant ON idempotency_steps (tenant_id)"

# Payloads arrive compressed, so the server need not try.
_POSTGRESQL_STORAGE: Final = Where(
    "SELECT attstorage <> 'e' FROM pg_attribute"
    " WHERE attrelid = to_regclass('idempotency_steps') AND attname = 'payload'",
    ("ALTER TABLE idempotency_steps ALTER COLUMN payload SET STORAGE EXTERNAL",),
)

_TABLE_COMMENT: Final = (
    "One row for each durable step of a request that is not completed. Only flask_idempotency writes to it."
)

_COLUMN_COMMENTS: Final = {
    "idempotency_records.steps": "recorded steps with an effect; above 0, a release keeps the record",
    "idempotency_records.step_write": "number of the last write to the journal by this fence",
    "idempotency_steps.step_id": "keyed hash of the name and the item of the step",
    "idempotency_steps.requested_at": "of the record: a key that is released and runs again has another",
    "idempotency_steps.position": "order of steps that began in the same microsecond",
    "idempotency_steps.in_line": "1: the view''s own thread took the step",
    "idempotency_steps.kept": "0: the result could not be kept",
    "idempotency_steps.fence": "of the claim that entered the step",
    "idempotency_steps.digest": "keyed digest of the arguments that are compared",
    "idempotency_steps.took": "microseconds that the function ran",
    "idempotency_steps.payload_size": "bytes of the plain item and result, as quotas count them",
    "idempotency_steps.payload": "item and result, as the codec encoded them",
    "idempotency_steps.wrapping_key_id": "id of the key that wraps the data key; NULL: the payload is not encrypted",
    "idempotency_steps.data_key_number": "number of the tenant''s data key; 0: the payload was erased",
}


def _add(name: str) -> str:
    return f"ALTER TABLE idempotency_records ADD COLUMN {name} {_COLUMNS[name]}"


STEP: Final = Step(
    number=3,
    what="idempotency_steps, and the columns steps and step_write of idempotency_records",
    statements={
        "postgresql": (
            *(new_column("idempotency_records", name, _add(name)) for name in _COLUMNS),
            _STEPS.format(bytes="BYTEA"),
            _POSTGRESQL_STORAGE,
            new_index("idempotency_steps", "idempotency_steps_of_tenant", _INDEX),
            Where(
                "SELECT obj_description(to_regclass('idempotency_steps'), 'pg_class')"  # noqa: S608 - our own words
                f" IS DISTINCT FROM '{_TABLE_COMMENT}'",
                (f"COMMENT ON TABLE idempotency_steps IS '{_TABLE_COMMENT}'",),
            ),
            *(column_comment(*each) for each in _COLUMN_COMMENTS.items()),
        ),
        "sqlite": (
            *(new_sqlite_column("idempotency_records", name, _add(name)) for name in _COLUMNS),
            _STEPS.format(bytes="BLOB"),
            _INDEX,
        ),
    },
)
