"""An empty database of each kind, and engines that are put away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, create_engine

on_postgresql = pytest.mark.parametrize("database_url", ("postgresql",), indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", ("sqlite",), indirect=True)


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
