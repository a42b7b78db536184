"""Real workers and real beats, on every broker that the documentation names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.assembly import build_store
from flask_idempotency.engine.model import State
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import found
from tests.books import book_in
from tests.janitor.conftest import HireCrew
from tests.janitor.crew import BEAT, PREFORK, SOLO, WITH_BEAT
from tests.janitor.records import abandoned, over, rows
from tests.sql_backends import make_tables
from tests.tooling.processes import eventually

# A RabbitMQ alone takes ten times as long to start where ten other tests run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'records.sqlite3'}"
    make_tables(url)
    return url


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return f"filesystem://{tmp_path / 'broker'}"


@dataclass(frozen=True)
class Arrangement:
    store: str
    broker: str | None
    commands: tuple[tuple[str, ...], ...]
    every: float = 1.0


ARRANGEMENTS: dict[str, Callable[[Callable[[str], Any]], Arrangement]] = {
    # The store's own Redis carries the tasks as well.
    "redis-solo": lambda ask: Arrangement(ask("redis_servers").get("valkey-9.1").url, None, ((*SOLO, *WITH_BEAT),)),
    "redis-socket-prefork": lambda ask: Arrangement(
        ask("redis_servers").get("valkey-9.1").unix_url, None, (PREFORK, BEAT)
    ),
    # A folder is looked into once in a second, by when a task that is due twice in one has expired.
    "folder-sqlite-prefork": lambda ask: Arrangement(
        ask("sqlite_url"), ask("folder_url"), ((*PREFORK, *WITH_BEAT),), every=1.5
    ),
    "rabbitmq-postgres-prefork": lambda ask: Arrangement(
        with_tables(ask("postgres_url")), ask("rabbitmq").url, (PREFORK, BEAT)
    ),
}


def with_tables(url: str) -> str:
    make_tables(url)
    return url


@pytest.mark.parametrize("arrangement", list(ARRANGEMENTS))
def test_it_sweeps(arrangement: str, request: pytest.FixtureRequest, hire_crew: HireCrew, tmp_path: Path) -> None:
    arranged = ARRANGEMENTS[arrangement](request.getfixturevalue)
    store: Any = build_store(arranged.store, memory={"after_loss": "run"})
    first, _ = abandoned(store), over(store)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    every = dict.fromkeys(("reap_interval", "expire_interval", "heartbeat_interval"), arranged.every)
    crew = hire_crew(store=arranged.store, broker=arranged.broker, **every)
    # In a folder of their own, to see what they leave in it.
    for command in arranged.commands:
        crew.start(
            *(str(crew.folder / word) if word == "beat/schedule" else word for word in command), folder=elsewhere
        )

    assert eventually(lambda: found(store, first).state is State.QUARANTINED)
    assert eventually(lambda: {"reap", "expire", "heartbeat"} <= book_in(store, "shop").reports().keys())
    if not isinstance(store, RedisStore):  # which ends records by itself
        assert eventually(lambda: rows(arranged.store) == 1)
    second = abandoned(store)
    assert eventually(lambda: found(store, second).state is State.QUARANTINED)
    assert [] == list(elsewhere.iterdir())
    store.close()
