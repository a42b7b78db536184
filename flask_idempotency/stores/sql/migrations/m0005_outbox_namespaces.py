"""Give messages a namespace, and ids that are unique in it. Relays of the release before leave such messages alone."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step, column_comment, new_column, new_index, new_sqlite_column

_TABLE: Final = "idempotency_outbox"

_COLUMNS: Final = {
    "namespace": "TEXT",
    "sent_id": "TEXT",
    "lane": "{bytes}",
    "digest": "{bytes}",
    "ready_at": "BIGINT",
}

# The unique index on message_id stays: publishers of the release before name it. They write an id there, and this release
# writes a keyed hash of the namespace, the tenant and the id.
_INDEXES: Final = {
    "idempotency_outbox_turn": "(namespace, attempts, seq) WHERE published_at IS NULL AND dead = 0",
    "idempotency_outbox_lane": "(namespace, lane, seq) WHERE published_at IS NULL AND lane IS NOT NULL",
    "idempotency_outbox_former": "(seq) WHERE published_at IS NULL AND namespace IS NULL",
}

# Comments of older columns stay: each run of all steps would set the old and the new ones, and lock the table for it.
_COLUMN_COMMENTS: Final = {
    "namespace": "of the application that published it; NULL: a release before namespaces did",
    "sent_id": "the id that receivers see; message_id is then a keyed hash of the namespace, the tenant and this id",
    "lane": "keyed hash of the topic and the key; messages with one lane are sent in order",
    "digest": "keyed digest of the topic, the key and the body",
    "ready_at": "the earliest time of the next attempt; due_at is then for relays of the release before",
}


def _index(name: str) -> str:
    return f"CREATE INDEX IF NOT EXISTS {name} ON idempotency_outbox {_INDEXES[name]}"


def _add(name: str, binary: str) -> str:
    return f"ALTER TABLE idempotency_outbox ADD COLUMN {name} {_COLUMNS[name].format(bytes=binary)}"


STEP: Final = Step(
    number=5,
    what="namespaces of messages in idempotency_outbox",
    statements={
        "postgresql": (
            *(new_column(_TABLE, name, _add(name, "BYTEA")) for name in _COLUMNS),
            *(new_index(_TABLE, name, _index(name)) for name in _INDEXES),
            *(column_comment(f"{_TABLE}.{name}", words) for name, words in _COLUMN_COMMENTS.items()),
        ),
        "sqlite": (*(new_sqlite_column(_TABLE, name, _add(name, "BLOB")) for name in _COLUMNS), *map(_index, _INDEXES)),
    },
)
