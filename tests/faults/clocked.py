"""Stores whose clock a test sets: real servers by the shim, and those that have this host's time by what they are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import create_engine

from example_app.demo.servers import RedisServer
from flask_idempotency.sql import upgrade
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from tests.faults.clock_shim import MakeWallClock, WallClock
from tests.forgiving import redis_store
from tests.postgres import PostgresServer
from tests.services import REDIS_KINDS, RedisServers, connect, postgres_installation
from tests.tooling.processes import eventually

SERVERS: Final = [*REDIS_KINDS, "postgresql"]
PLACES: Final = ["memory", "sqlite", *SERVERS]

NEAR_SECONDS: Final = 60.0
"""No step of a clock is smaller, and no machine so busy that it needs longer from one look to the next."""


@dataclass
class Place:
    """One store, and the clock that it goes by."""

    name: str
    store: Any
    url: str
    _set: Callable[[float], None]
    _now: Callable[[], float]

    def set_ahead(self, seconds: float) -> None:
        """Set the store's clock so far ahead of ours, at once. Returns when the store goes by it."""
        self._set(seconds)
        # A server may remember for a millisecond what time it was.
        assert eventually(lambda: abs(self._now() - time.time() - seconds) < NEAR_SECONDS)


class Clocked:
    """Servers whose clocks can be set, by kind: started when somebody asks, and kept for the next one."""

    def __init__(self, make_wall_clock: MakeWallClock, redis_servers: RedisServers) -> None:
        self._make_wall_clock = make_wall_clock
        self._redis_servers = redis_servers
        self._running: dict[str, tuple[WallClock, RedisServer | PostgresServer]] = {}

    def get(self, kind: str) -> tuple[WallClock, RedisServer | PostgresServer]:
        """A server of this kind, and its clock. It is as the last one has left it."""
        if kind not in self._running:
            clock = self._make_wall_clock()
            self._running[kind] = clock, self._start(kind, clock.environment)
        return self._running[kind]

    def _start(self, kind: str, environment: Mapping[str, str]) -> RedisServer | PostgresServer:
        if kind == "postgresql":
            return PostgresServer(postgres_installation(), environment=environment)
        return RedisServer(self._redis_servers.program(kind), environment=environment)

    def stop(self) -> None:
        for _, server in self._running.values():
            server.stop()


@pytest.fixture(scope="session")
def clocked(make_wall_clock: MakeWallClock, redis_servers: RedisServers) -> Iterator[Clocked]:
    clocked = Clocked(make_wall_clock, redis_servers)
    yield clocked
    clocked.stop()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty store of one kind, and its clock. Asking for this runs the test on every kind."""
    with ExitStack() as ends:
        if request.param in SERVERS:
            clock, server = request.getfixturevalue("clocked").get(request.param)
            place = _on(request.param, clock, server, ends)
        else:
            place = _in_this_process(request.param, request.getfixturevalue("tmp_path"), ends)
        place.set_ahead(0)
        yield place
        place.set_ahead(0)


def _in_this_process(name: str, folder: Path, ends: ExitStack) -> Place:
    ahead = 0.0

    def now() -> float:
        return time.time() + ahead

    def set_ahead(seconds: float) -> None:
        nonlocal ahead
        ahead = seconds

    if name == "memory":
        return Place(name, MemoryStore(now), "memory://", set_ahead, now)
    url = f"sqlite:///{folder / 'records.sqlite'}"
    return Place(name, _in_tables(url, ends, clock=now), url, set_ahead, now)


def _on(kind: str, clock: WallClock, server: RedisServer | PostgresServer, ends: ExitStack) -> Place:
    def set_ahead(seconds: float) -> None:
        clock.ahead = seconds

    if isinstance(server, RedisServer):
        client = ends.enter_context(connect(server.url))
        client.flushall()
        store = redis_store(server.url)
        ends.callback(store.close)
        return Place(kind, store, server.url, set_ahead, lambda: float(client.time()[0]))
    database = ends.enter_context(server.database())
    connection = ends.enter_context(psycopg.connect(server.conninfo(database), autocommit=True))

    def now() -> float:
        row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
        assert row is not None
        return float(row[0])

    url = server.url(database)
    return Place(kind, _in_tables(url, ends), url, set_ahead, now)


def _in_tables(url: str, ends: ExitStack, *, clock: Callable[[], float | None] = lambda: None) -> SqlStore:
    engine = create_engine(url)
    upgrade(engine)
    engine.dispose()
    store = SqlStore(Database(url), clock=clock)
    ends.callback(store.close)
    return store
