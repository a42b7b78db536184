"""Create the table of journals, and the columns that say of each record whether it has one."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, Where, new_column, new_index, new_table

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

# Payloads arrive compressed, so the server need not try.
_POSTGRESQL_STORAGE: Final = Where(
    "SELECT attstorage <> 'e' FROM pg_attribute"
    " WHERE attrelid = to_regclass('idempotency_steps') AND attname = 'payload'",
    ("ALTER TABLE idempotency_steps ALTER COLUMN payload SET STORAGE EXTERNAL",),
)

STEP: Final = Step(
    number=3,
    what="idempotency_steps, and the columns steps and step_write of idempotency_records",
    parts=(
        new_column("idempotency_records", "steps", "SMALLINT DEFAULT 0 NOT NULL"),
        new_column("idempotency_records", "step_write", "INTEGER DEFAULT 0 NOT NULL"),
        new_table(_STEPS),
        {"postgresql": _POSTGRESQL_STORAGE},
        new_index("idempotency_steps", "idempotency_steps_of_tenant", "(tenant_id)"),
    ),
)
