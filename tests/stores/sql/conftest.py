"""An empty database of each kind, and engines that are put away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, create_engine

from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.shops import open_, shop

__all__ = ["open_", "shop"]

on_postgresql = pytest.mark.parametrize("database_url", ("postgresql",), indirect=True)
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


class MakeEngine(Protocol):
    def __call__(self, url: str | None = None, **options: Any) -> Engine: ...


@pytest.fixture(params=("postgresql", "sqlite"))
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Asking for this runs the test once on each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'database.sqlite'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


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


class OpenStore(Protocol):
    def __call__(self, url: str | None = None, *, strategy: str = ..., clock: Clock = ...) -> SqlStore: ...


@pytest.fixture
def records_url(database_url: str, make_engine: MakeEngine) -> str:
    """A database of each kind that holds our tables and nothing else."""
    metadata.create_all(make_engine())
    return database_url


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def open_store(records_url: str, clock: FrozenClock) -> Iterator[OpenStore]:
    """Stores on this database or another, by the test's clock, closed at the end."""
    with ExitStack() as stores:

        def open_one(url: str | None = None, *, strategy: str = "insert", clock: Clock = clock) -> SqlStore:
            store = SqlStore(Database(url or records_url), strategy=strategy, clock=clock)
            stores.callback(store.close)
            return store

        yield open_one
