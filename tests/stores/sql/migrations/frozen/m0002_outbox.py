"""Create the table of messages that an application has published and a relay has not sent yet."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, new_index, new_table

_OUTBOX: Final = """\
CREATE TABLE IF NOT EXISTS idempotency_outbox (
    seq {serial},
    message_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    {key} TEXT,
    tenant TEXT,
    tenant_id {bytes},
    headers TEXT NOT NULL,
    body {bytes} NOT NULL,
    wrapping_key_id TEXT,
    data_key_number INTEGER,
    created_at BIGINT NOT NULL,
    due_at BIGINT NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL,
    holder {bytes},
    held_until BIGINT,
    dead SMALLINT DEFAULT 0 NOT NULL,
    error TEXT,
    published_at BIGINT{primary_key}
)"""

_TABLE: Final = "idempotency_outbox"

STEP: Final = Step(
    number=2,
    what="idempotency_outbox",
    parts=(
        new_table(
            _OUTBOX,
            serial=("BIGSERIAL NOT NULL", "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT"),
            key=("key", '"key"'),
            primary_key=(",\n    PRIMARY KEY (seq)", ""),
        ),
        new_index(_TABLE, "idempotency_outbox_message", "(message_id)", unique=True),
        new_index(_TABLE, "idempotency_outbox_unsent", "(seq) WHERE published_at IS NULL"),
        new_index(
            _TABLE, "idempotency_outbox_order", '(topic, "key", seq) WHERE published_at IS NULL AND key IS NOT NULL'
        ),
        new_index(_TABLE, "idempotency_outbox_kept", "(published_at) WHERE published_at IS NOT NULL"),
    ),
)
