"""Give messages a namespace, and ids that are unique in it. Relays of the release before leave such messages alone."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step, Where

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


def _postgresql_index(name: str) -> Where:
    # Even with IF NOT EXISTS it waits for all writers of the table, and new writers wait for it.
    condition = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"  # noqa: S608 - our own words
        f" WHERE indrelid = to_regclass('idempotency_outbox') AND relname = '{name}')"
    )
    return Where(condition, (_index(name),))


def _postgresql_column(name: str) -> Where:
    # Even with IF NOT EXISTS it locks the table for all other transactions.
    condition = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_attribute"  # noqa: S608 - our own words
        f" WHERE attrelid = to_regclass('idempotency_outbox') AND attname = '{name}' AND NOT attisdropped)"
    )
    return Where(condition, (_add(name, "BYTEA"),))


def _sqlite_column(name: str) -> Where:
    condition = f"SELECT NOT EXISTS (SELECT 1 FROM pragma_table_info('idempotency_outbox') WHERE name = '{name}')"  # noqa: S608
    return Where(condition, (_add(name, "BLOB"),))


def _add(name: str, binary: str) -> str:
    return f"ALTER TABLE idempotency_outbox ADD COLUMN {name} {_COLUMNS[name].format(bytes=binary)}"


def _column_comment(column: str) -> Where:
    words = _COLUMN_COMMENTS[column]
    return Where(
        f"SELECT col_description(attrelid, attnum) IS DISTINCT FROM '{words}' FROM pg_attribute"  # noqa: S608
        f" WHERE attrelid = to_regclass('idempotency_outbox') AND attname = '{column}'",
        (f"COMMENT ON COLUMN idempotency_outbox.{column} IS '{words}'",),
    )


STEP: Final = Step(
    number=5,
    what="namespaces of messages in idempotency_outbox",
    statements={
        "postgresql": (
            *map(_postgresql_column, _COLUMNS),
            *map(_postgresql_index, _INDEXES),
            *map(_column_comment, _COLUMN_COMMENTS),
        ),
        "sqlite": (*map(_sqlite_column, _COLUMNS), *map(_index, _INDEXES)),
    },
)
