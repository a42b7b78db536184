"""A server that accepts connections and says nothing, as a frozen one does."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore


@pytest.fixture
def silent() -> Iterator[str]:
    """The kernel accepts for it, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"postgresql+psycopg://nobody@127.0.0.1:{listener.getsockname()[1]}/nothing"


def test_a_new_connection_for_records_is_not_waited_for_as_an_application_waits_for_its_own(silent: str) -> None:
    """Most applications say nothing of time-outs, and libpq would wait for two minutes: a claim is refused long before."""
    engine = create_engine(silent)
    store = SqlStore(Database(engine))
    began = time.monotonic()

    with pytest.raises(StoreUnavailable):
        store.read(StorageKey(b"r" * 32, b"t" * 32))

    assert time.monotonic() - began < 60
    store.close()
    engine.dispose()


def test_the_applications_own_connections_wait_as_it_has_chosen(silent: str) -> None:
    """What it said of them is neither changed nor added to, and holds for ours as well."""
    engine = create_engine(silent, connect_args={"connect_timeout": 42})
    asked: list[object] = []

    def connect(*arguments: object, **options: object) -> None:
        asked.append({name: options.get(name) for name in ("connect_timeout", "tcp_user_timeout")})
        raise ConnectionRefusedError

    engine.dialect.connect = connect  # type: ignore[assignment, method-assign]
    store = SqlStore(Database(engine))
    for attempt in (engine.connect, store.database.engine.connect):
        with pytest.raises(ConnectionRefusedError):
            attempt()

    assert asked == [
        {"connect_timeout": 42, "tcp_user_timeout": None},
        {"connect_timeout": 42, "tcp_user_timeout": 5000},
    ]
