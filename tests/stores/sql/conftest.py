"""An empty database of each kind, and engines that are put away."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pytest
from sqlalchemy import Connection, Engine, create_engine

from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.sql import dialects
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.doubles import FrozenClock
from tests.lab.mariadb import MariaDbServer
from tests.lab.postgres import LentDatabase, PostgresServer
from tests.sql_backends import make_tables
from tests.stores.sql.shops import make_shop, open_, shop

__all__ = ["open_", "shop"]
on_both = pytest.mark.parametrize("database_url", ("postgresql", "sqlite"), indirect=True)
on_postgresql = pytest.mark.parametrize("database_url", ("postgresql",), indirect=True)
on_mariadb = pytest.mark.parametrize("database_url", ("mariadb",), indirect=True)
on_each = pytest.mark.parametrize("database_url", ("postgresql", "mariadb", "sqlite"), indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", ("sqlite",), indirect=True)
by_every_strategy = pytest.mark.parametrize(
    ("database_url", "strategy"),
    (("sqlite", "insert"), ("postgresql", "insert"), ("postgresql", "row_lock"), ("postgresql", "advisory")),
    indirect=("database_url",),
)
by_every_lock = pytest.mark.parametrize(
    ("database_url", "strategy"),
    (("postgresql", "insert"), ("postgresql", "row_lock"), ("postgresql", "advisory")),
    indirect=("database_url",),
)

RENEW = "UPDATE idempotency_meta SET value = {} WHERE name = 'store'"
"""What a process remembers of a store it remembers by this number: no test may find what it remembers of another's."""


class MakeEngine(Protocol):
    def __call__(self, url: str | None = None, **options: Any) -> Engine: ...


@pytest.fixture(autouse=True)
def _no_listener_of_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy keeps this flag of the class when a listener is removed, and our stores leave the driver's cursor by it."""
    monkeypatch.setattr(Engine, "_has_events", False)


@pytest.fixture(scope="session")
def records_database(postgres_server: PostgresServer) -> Iterator[LentDatabase]:
    with closing(LentDatabase(postgres_server, make_tables, renew=RENEW.format("floor(random() * 1e15)"))) as database:
        yield database


def _make_shop(url: str) -> None:
    engine = create_engine(url)
    make_shop(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def shop_database(postgres_server: PostgresServer) -> Iterator[LentDatabase]:
    with closing(LentDatabase(postgres_server, _make_shop, renew=RENEW.format("floor(random() * 1e15)"))) as database:
        yield database


@pytest.fixture(scope="session")
def records_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with our tables, to copy."""
    file = tmp_path_factory.mktemp("records") / "database.sqlite"
    make_tables(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def shop_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the tables of a shop, to copy."""
    file = tmp_path_factory.mktemp("shop") / "database.sqlite"
    _make_shop(f"sqlite:///{file}")
    return file


def lent_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of the kind `request.param`: that of a shop for a test that uses `open_`, with our tables for one that uses
    `records_url`, otherwise empty."""
    names = request.fixturenames
    made = "shop" if "open_" in names else "records" if "records_url" in names else ""
    if request.param == "sqlite":
        file = tmp_path / "database.sqlite"
        if made:
            shutil.copy(request.getfixturevalue(f"{made}_file"), file)
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute(RENEW.format("random() & 9223372036854775807"))
        yield f"sqlite:///{file}"
    elif request.param == "mariadb":
        server: MariaDbServer = request.getfixturevalue("mariadb_server")
        with server.database() as name:
            if made:
                (_make_shop if made == "shop" else make_tables)(server.url(name))
            yield server.url(name)
    else:
        database: LentDatabase = request.getfixturevalue(f"{made or 'empty'}_database")
        with database.lent() as url:
            yield url


# A test that uses this runs once on each kind of database.
database_url = pytest.fixture(params=("postgresql", "sqlite"), name="database_url")(lent_url)


@pytest.fixture
def make_engine(database_url: str) -> Iterator[MakeEngine]:
    """Engines on this database or another, disposed of at the end."""
    with ExitStack() as engines:

        def make(url: str | None = None, **options: Any) -> Engine:
            engine = create_engine(url or database_url, **options)
            engines.callback(engine.dispose)
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def elsewhere(make_engine: MakeEngine, records_url: str) -> Iterator[Connection]:
    """A second connection, whose transaction stays open until the test ends it."""
    with make_engine().connect() as connection:
        yield connection


LockTimeout: TypeAlias = Callable[[int], None]


@pytest.fixture
def lock_timeout(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockTimeout]:
    """Set for how many milliseconds statements wait for a lock. Each is made once in a process: not for the next test."""

    def set_to(milliseconds: int) -> None:
        monkeypatch.setattr(dialects, "LOCK_TIMEOUT_MS", milliseconds)
        dialects.made.cache_clear()

    yield set_to
    dialects.made.cache_clear()


class OpenStore(Protocol):
    def __call__(self, url: str | None = None, *, strategy: str = ..., clock: Clock = ...) -> SqlStore: ...


@pytest.fixture
def records_url(database_url: str) -> str:
    """A database of each kind that holds our tables and nothing else."""
    return database_url


@pytest.fixture
def open_store(records_url: str, clock: FrozenClock) -> Iterator[OpenStore]:
    """Stores on this database or another, by the test's clock, closed at the end."""
    with ExitStack() as stores:

        def open_one(url: str | None = None, *, strategy: str = "insert", clock: Clock = clock) -> SqlStore:
            store = SqlStore(Database(url or records_url), strategy=strategy, clock=clock)
            stores.callback(store.close)
            return store

        yield open_one
