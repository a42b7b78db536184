"""Create the table of messages that an application has published and a relay has not sent yet."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step, column_comment, new_index, table_comment

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

_INDEXES: Final = {
    "idempotency_outbox_message": "CREATE UNIQUE INDEX IF NOT EXISTS {name} ON idempotency_outbox (message_id)",
    "idempotency_outbox_unsent": (
        "CREATE INDEX IF NOT EXISTS {name} ON idempotency_outbox (seq) WHERE published_at IS NULL"
    ),
    "idempotency_outbox_order": (
        "CREATE INDEX IF NOT EXISTS {name} ON idempotency_outbox (topic, {key}, seq)"
        " WHERE published_at IS NULL AND key IS NOT NULL"
    ),
    "idempotency_outbox_kept": (
        "CREATE INDEX IF NOT EXISTS {name} ON idempotency_outbox (published_at) WHERE published_at IS NOT NULL"
    ),
}


def _index(name: str) -> str:
    return _INDEXES[name].format(name=name, key='"key"')


_TABLE_COMMENT: Final = "One row for each message that an application has published. A relay sends it and deletes it."

_COLUMN_COMMENTS: Final = {
    "seq": "the order of messages with one topic and key",
    "message_id": "the same in every attempt; receivers tell repeats by it",
    "key": "messages with one topic and key are sent in order",
    "tenant_id": "set if the body is encrypted: HMAC of the namespace and the tenant",
    "headers": "a JSON object of strings",
    "wrapping_key_id": "id of the key that wraps the data key; NULL: the body is not encrypted",
    "data_key_number": "number of the tenant''s data key",
    "due_at": "the earliest time of the next attempt",
    "attempts": "attempts that failed",
    "holder": "token of the relay that sends the message",
    "dead": "1: it can never be sent",
    "error": "why the last attempt failed",
    "published_at": "set if confirmed messages are kept",
}


STEP: Final = Step(
    number=2,
    what="idempotency_outbox",
    statements={
        "postgresql": (
            _OUTBOX.format(
                serial="BIGSERIAL NOT NULL",
                key="key",
                bytes="BYTEA",
                primary_key=",\n    PRIMARY KEY (seq)",
            ),
            *(new_index(_TABLE, name, each.format(name=name, key="key")) for name, each in _INDEXES.items()),
            table_comment(_TABLE, _TABLE_COMMENT),
            *(column_comment(f"{_TABLE}.{name}", words) for name, words in _COLUMN_COMMENTS.items()),
        ),
        "sqlite": (
            _OUTBOX.format(
                serial="INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", key='"key"', bytes="BLOB", primary_key=""
            ),
            *map(_index, _INDEXES),
        ),
    },
)
