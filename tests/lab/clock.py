"""A wall clock that a test sets while the server runs, and the stores that go by one.

Real servers get it by a preloaded library, and stores that read this host's time by a function.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg
from sqlalchemy import create_engine

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.store import SqlStore
from tests.forgiving import redis_store
from tests.lab.postgres import PostgresServer, postgres_installation
from tests.lab.programs import missing
from tests.lab.redis import RedisServers, connect
from tests.tooling.processes import eventually

SOURCE: Final = Path(__file__).with_name("clock_shim.c")
COMPILE_SECONDS: Final = 60

NEAR_SECONDS: Final = 60.0
"""No step of a clock is smaller, and no machine so busy that it needs longer from one look to the next."""

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


class WallClock:
    """The wall clock of every program that was started with this `environment`, children included.

    Clocks that nobody can set go on as they are, so such a program finds what an operator or a bad NTP server does.
    """

    def __init__(self, shim: Path, file: Path) -> None:
        self._file = file
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(shim), "IDEMPOTENCY_TEST_CLOCK": str(file)}
        self.ahead = 0.0
        file.chmod(0o644)

    @property
    def ahead(self) -> float:
        """By how many seconds it is ahead of ours. Setting this sets the clock at once."""
        return self._ahead

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._ahead = seconds
        with self._file.open("r+b") as file:
            # In one write, and never truncated: the servers have it mapped.
            file.write(struct.pack("=q", round(seconds * 1_000_000)))


def compiled(folder: Path) -> Path:
    """The shim, built for this machine."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing("a C compiler", remedy="Install your system's package of gcc or clang, with the headers of its libc.")
    if sys.platform != "linux":
        missing("Linux", remedy="The wall clock of a server can be shifted there alone.")
    shim = folder / "clock_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(shim), str(SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    assert built.returncode == 0, built.stderr
    return shim


class MakeWallClock(Protocol):
    def __call__(self) -> WallClock: ...


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


def in_this_process(name: str, folder: Path, ends: ExitStack) -> Place:
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


def on_server(kind: str, clock: WallClock, server: RedisServer | PostgresServer, ends: ExitStack) -> Place:
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
