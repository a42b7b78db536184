"""SQL stores to run the contract on: each is made once in a test process, and lent to one test after the other.

To make a store is to write down a hundred statements, and each has to be compiled at its first use: most tests of the
contract would spend more time on that than on what they are about. What a new one is like is tested in `tests/stores/sql`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event

from flask_idempotency.engine.store import Clock, Store, store_time
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.mysql import NUMBERED
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from tests.lab.mariadb import MariaDbServer
from tests.lab.pgbouncer import PgBouncer
from tests.lab.postgres import PostgresServer


class Lent:
    """A store that goes by the clock of whoever has it."""

    def __init__(self, url: str, strategy: str, *, driver_cursor: bool) -> None:
        self._clock: Clock = store_time
        self.store = SqlStore(
            Database(url, driver_cursor=driver_cursor), strategy=strategy, clock=lambda: self._clock()
        )

    def to(self, clock: Clock) -> SqlStore:
        self._clock = clock
        # As one that has met no quota yet: what it has learned from another test would spare this one a statement.
        self.store.completing.counts = False
        return self.store


class SqlStores:
    """By where they keep their records and how they take a key."""

    def __init__(self, folder: Path) -> None:
        self._made: dict[tuple[str, str, bool], Lent] = {}
        # SQLite has no queue: on a busy machine one of many writers waits longer than our five seconds.
        self._file = f"sqlite:///{folder / 'records.sqlite'}?timeout=60"
        self._made_file = False

    def lend(
        self,
        url: str,
        *,
        strategy: str = "insert",
        driver_cursor: bool = True,
        prepare: Callable[[SqlStore], None] | None = None,
    ) -> Callable[[Clock], Store]:
        made = url, strategy, driver_cursor
        if made not in self._made:
            self._made[made] = Lent(url, strategy, driver_cursor=driver_cursor)
            if prepare is not None:
                prepare(self._made[made].store)
        return self._made[made].to

    def lend_file(self, *, driver_cursor: bool = True) -> Callable[[Clock], Store]:
        if not self._made_file:
            make_tables(self._file)
            self._made_file = True
        return self.lend(self._file, driver_cursor=driver_cursor)

    def close(self) -> None:
        for lent in self._made.values():
            lent.store.close()


@pytest.fixture(scope="session")
def sql_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStores]:
    stores = SqlStores(tmp_path_factory.mktemp("contract"))
    yield stores
    stores.close()


def make_tables(url: str) -> None:
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()


class SqlDatabases:
    """Databases with our tables on one server, by what they set for who connects. Made once: the contract needs no
    empty ones."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._made: dict[str, str] = {}

    def get(self, isolation: str) -> str:
        if isolation not in self._made:
            name = f"contract_{uuid.uuid4().hex}"
            self._server.create_database(name)
            make_tables(self._server.url(name))
            engine = create_engine(self._server.url(name), isolation_level="AUTOCOMMIT")
            with engine.connect() as connection:
                connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
            engine.dispose()
            self._made[isolation] = name
        return self._made[isolation]


@pytest.fixture(scope="session")
def sql_databases(postgres_server: PostgresServer) -> SqlDatabases:
    return SqlDatabases(postgres_server)


def sqlite(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Clock], Store]:
    stores: SqlStores = request.getfixturevalue("sql_stores")
    return stores.lend_file()


def sqlite_core(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Clock], Store]:
    """Through SQLAlchemy's `Connection`, as with a driver that the store does not know."""
    stores: SqlStores = request.getfixturevalue("sql_stores")
    return stores.lend_file(driver_cursor=False)


def postgres(
    strategy: str, *, isolation: str = "read committed", pooled: bool = False, driver_cursor: bool = True
) -> Callable[[pytest.FixtureRequest, ExitStack], Callable[[Clock], Store]]:
    """On a server by this strategy; pooled, behind a PgBouncer that hands out its connections by the transaction."""

    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Clock], Store]:
        databases: SqlDatabases = request.getfixturevalue("sql_databases")
        server: PostgresServer | PgBouncer = request.getfixturevalue("pgbouncer" if pooled else "postgres_server")
        stores: SqlStores = request.getfixturevalue("sql_stores")
        return stores.lend(server.url(databases.get(isolation)), strategy=strategy, driver_cursor=driver_cursor)

    return backend


class MariaDatabase:
    """A database with our tables, made at the first use."""

    def __init__(self, server: MariaDbServer) -> None:
        self._server = server
        self._url = ""

    def get(self) -> str:
        if not self._url:
            name = f"contract_{uuid.uuid4().hex}"
            self._server.execute(f"CREATE DATABASE {name}")
            make_tables(self._server.url(name))
            self._url = self._server.url(name)
        return self._url


@pytest.fixture(scope="session")
def maria_database(mariadb_server: MariaDbServer) -> MariaDatabase:
    return MariaDatabase(mariadb_server)


def count_by_a_row(store: SqlStore) -> None:
    """Let fences of this store come from a row, as on MySQL and in Galera: see `mysql.has_sequences`."""

    def forget(connection: object, record: Any) -> None:
        record.info.pop(NUMBERED, None)
        store.database.numbers.due = False

    event.listen(store.database.engine, "connect", forget)


def mariadb(
    strategy: str, *, by_row: bool = False
) -> Callable[[pytest.FixtureRequest, ExitStack], Callable[[Clock], Store]]:
    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Clock], Store]:
        database: MariaDatabase = request.getfixturevalue("maria_database")
        stores: SqlStores = request.getfixturevalue("sql_stores")
        return stores.lend(database.get(), strategy=strategy, prepare=count_by_a_row if by_row else None)

    return backend


STRATEGIES = ("insert", "row_lock", "advisory")
