"""The activity of two real processes adds up exactly in one store, also after one of them was killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from http.client import IncompleteRead, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.assembly import build_store
from flask_idempotency.engine.activity import HOUR, MINUTE
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.activity import Figures, summary
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from tests.e2e.conftest import Serve
from tests.e2e.processes import Server, kill
from tests.e2e.wire import Order, ask
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

APP = "tests.e2e.counting_service:from_environment()"
NEVER, ALWAYS = "3600", "0.02"
"""Seconds between two flushes."""
WAIT_SECONDS = 60.0
"""Only a failure takes this long."""
THREADS = 8


@pytest.fixture(params=("redis", "sqlite"))
def url(request: pytest.FixtureRequest, redis_servers: RedisServers, tmp_path: Path) -> str:
    if request.param == "redis":
        return redis_servers.get(REDIS_KINDS[0]).url
    url = f"sqlite:///{tmp_path / 'records.sqlite'}"
    store = SqlStore(Database(url))
    store.schema.upgrade()
    return url


@pytest.fixture
def counted(url: str) -> Iterator[Callable[[], Figures]]:
    """Return a function that returns what the store has counted."""
    store: Any = build_store(url)
    with closing(store) if hasattr(store, "close") else nullcontext():
        yield lambda: summary(store.activity, owner_mark("victim"), seconds=HOUR, length=MINUTE).total


def serve_two(serve_once: Serve, url: str, *, flush: str, alone: bool = False) -> list[Server]:
    """Start two servers of one process each, so that a test can choose which one it asks and kills."""
    return [
        serve_once(
            url,
            app=APP,
            name=name,
            alone=alone,
            environment={"E2E_FLUSH_SECONDS": flush},
            config={"IDEMPOTENCY_ACTIVITY": True},
        )
        for name in ("one", "two")
    ]


def send(servers: list[Server], orders: list[Order]) -> None:
    """Send each order once to each server, the orders side by side."""

    def each(order: Order) -> None:
        for server in servers:
            assert ask(server.port, order.attempt()).status == 201

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(each, orders))


def outcomes(figures: Figures) -> dict[str, int]:
    return {
        **{name: number for name, number in {**figures.outcomes, **figures.endings}.items() if number},
        "new times": figures.new_times.count,
        "replayed times": figures.replayed_times.count,
    }


def test_two_processes_add_up_exactly_while_they_flush_all_the_time(
    serve_once: Serve, url: str, counted: Callable[[], Figures]
) -> None:
    """Their flushes meet in the same minute, and each count arrives once."""
    servers = serve_two(serve_once, url, flush=ALWAYS)
    expected = {"new": 60, "completed": 60, "replayed": 60, "new times": 60, "replayed times": 60}

    send(servers, [Order("/plain") for _ in range(30)])
    send(servers[::-1], [Order("/marked") for _ in range(30)])

    until = time.monotonic() + WAIT_SECONDS
    while outcomes(counted()) != expected and time.monotonic() < until:
        time.sleep(0.05)
    assert outcomes(counted()) == expected


def test_processes_that_end_add_what_they_have(serve_once: Serve, url: str, counted: Callable[[], Figures]) -> None:
    servers = serve_two(serve_once, url, flush=NEVER, alone=True)
    send(servers, [Order("/plain") for _ in range(20)])
    assert counted().requests == 0

    for server in servers:
        server.end()

    assert outcomes(counted()) == {
        "new": 20,
        "completed": 20,
        "replayed": 20,
        "new times": 20,
        "replayed times": 20,
    }


def test_a_killed_process_loses_only_what_it_had_not_added(
    serve_once: Serve, url: str, counted: Callable[[], Figures]
) -> None:
    one, two = serve_two(serve_once, url, flush=ALWAYS)
    send([one], [Order("/plain") for _ in range(20)])
    until = time.monotonic() + WAIT_SECONDS
    while counted().requests < 20 and time.monotonic() < until:
        time.sleep(0.05)

    orders = [Order("/plain") for _ in range(200)]
    answered = list[int]()

    def until_killed() -> None:
        with suppress(OSError, RemoteDisconnected, IncompleteRead):
            for order in orders:
                answered.append(ask(one.port, order.attempt()).status)
                if len(answered) == 50:
                    kill(one.workers[0])
                    one.stop()

    until_killed()
    added = counted()
    two.end()

    assert len(answered) >= 50
    assert 20 <= added.of("new") <= 20 + len(answered) + 1
    assert counted().of("new") == added.of("new"), "nothing of it arrives later"
    assert added.of("completed") <= added.of("new")
