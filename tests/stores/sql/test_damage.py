"""SQLite keeps anything in any column: whatever stands there, a caller is told of damage, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from sqlalchemy import Table

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, IdempotencyError, StoreUnavailable
from flask_idempotency.engine.model import Grant, SealedBy, StoredPayload
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, a_key, a_request, a_token, granted
from flask_idempotency.testing.doubles import FrozenClock
from tests.damage import outcome, questions
from tests.stores.sql.conftest import OpenStore, on_sqlite

pytestmark = pytest.mark.slow

ODD: dict[str, Any] = {
    "nothing": None,
    "largest": 2**63 - 1,
    "least": -(2**63),
    "words": "words",
    "fraction": 1.5,
    "bytes": b"\xff\xfe",
    "no text": "CAST(x'ff' AS TEXT)",
}
EXPECTED = (CorruptRecord, StoreUnavailable, ConfigurationError)


def places(*tables: Table) -> list[tuple[str, str]]:
    return [(table.name, column.name) for table in tables for column in table.columns]


def set_to(url: str, table: str, column: str, odd: str) -> None:
    value = ODD[odd]
    with closing(connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        # A column that may not be empty, and numbers that a column turns into others, stay as they are.
        said = value if odd == "no text" else "?"
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = {said}", () if odd == "no text" else (value,))  # noqa: S608
        connection.commit()


@on_sqlite
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("standing", ("completed", "in flight", "quarantined"))
def test_a_damaged_row_raises_only_our_errors(
    open_store: OpenStore, records_url: str, clock: FrozenClock, standing: str, odd: str
) -> None:
    """Column by column, whoever asks: a claim, a reader, a janitor. What was done is granted to nobody."""
    store = open_store()
    for table, column in places(schema.records):
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=1000)))
        if standing == "completed":
            store.complete(key, token, StoredPayload(b"\x10bytes", 201, True, 300), keep=KEEP)
        elif standing == "quarantined":
            store.quarantine(key, token, "view-crashed")
        set_to(records_url, table, column, odd)

        claimed = outcome(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE), EXPECTED)  # noqa: B023
        for ask in questions(store, clock, key, limit=10).values():
            outcome(ask, EXPECTED)
        forgotten = column in ("expires_at", "record_id")
        assert forgotten or not isinstance(claimed, Grant), (column, claimed)
        # With `on_store_down="allow"` that would let the work run again.
        assert not isinstance(claimed, StoreUnavailable), (column, claimed)
        _empty(records_url)


@on_sqlite
@pytest.mark.parametrize("odd", ODD)
def test_damage_outside_records_raises_only_our_errors(
    open_store: OpenStore, records_url: str, clock: FrozenClock, odd: str
) -> None:
    beside = (schema.tenants, schema.data_keys, schema.quota_buckets, schema.tasks, schema.meta)
    store = open_store()
    for table, column in places(*beside):
        if table == schema.meta.name:
            # Damage in there stays, and a store remembers what it has read of it.
            store = open_store()
        key = a_key()
        _fill(store, key)
        set_to(records_url, table, column, odd)
        asks: tuple[Callable[[], object], ...] = (
            *questions(store, clock, key, limit=10).values(),
            lambda: store.identity(),  # noqa: B023
            lambda: store.schema.faults(),  # noqa: B023
            lambda: store.claim(  # noqa: B023
                a_request(a_key(tid=key.tid)),  # noqa: B023
                token=a_token(),
                lease=LEASE,
                quota=Quota(records=9, bytes=9999, in_flight=9, new_keys=NewKeys(9, 60)),
            ),
        )
        for ask in asks:
            outcome(ask, EXPECTED)
        _empty(records_url)


def _fill(store: SqlStore, key: Any) -> None:
    shelf = store.data_keys.read_keys(key.tid)
    assert store.data_keys.add(key.tid, DataKey(1, "k", b"wrapped"), store=shelf.store, after=shelf.last)
    store.ledger.limit(key.tid, Quota(records=100, bytes=10**6, in_flight=10, new_keys=NewKeys(100, 60)))
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=100)))
    store.complete(key, token, StoredPayload(b"\x10bytes", 201, True, 300, SealedBy("k", 1)), keep=KEEP)
    store.task_log.report("heartbeat", '{"skew_ms": 1}')


def _empty(url: str) -> None:
    """As after the migrations. What is damaged must not be met by the next column's turn."""
    path = Path(url.removeprefix("sqlite:///"))
    with closing(connect(path)) as connection:
        for table in (schema.records, schema.tenants, schema.data_keys, schema.quota_buckets, schema.tasks):
            connection.execute(f"DELETE FROM {table.name}")  # noqa: S608
        connection.commit()


def test_expected_errors_are_public_errors() -> None:
    assert all(issubclass(each, IdempotencyError) for each in EXPECTED)
