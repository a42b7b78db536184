"""The fixtures that start servers, once per test process when a test first uses one, and a clock.

This module is loaded for every run, so it imports a server's module only in the fixture that needs it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.programs import MISSING, REDIS_KINDS

if TYPE_CHECKING:
    import redis

    from example_app.demo.servers import RedisServer
    from flask_idempotency.testing import FrozenClock
    from tests.lab.clock import Clocked, MakeWallClock, Place, WallClock
    from tests.lab.cluster import ClusterRig, ClusterRigs, Clusters
    from tests.lab.galera import GaleraCluster
    from tests.lab.mariadb import MariaDbServer, StartMariaDb
    from tests.lab.pgbouncer import PgBouncer, PoolMode, StartPgBouncer
    from tests.lab.postgres import LentDatabase, PostgresServer, StartPostgres
    from tests.lab.rabbitmq import RabbitServer
    from tests.lab.redis import RedisServers, StartRedis
    from tests.lab.sentinel import SentinelRig, SentinelRigs
    from tests.lab.tls import TlsFront

PLACES = ["memory", "sqlite", *REDIS_KINDS, "postgresql"]


@pytest.fixture
def clock() -> FrozenClock:
    """A clock for a store. It stands still unless the test advances it."""
    from flask_idempotency.testing import FrozenClock

    return FrozenClock()


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[RedisServers]:
    from tests.lab.redis import RedisServers

    servers = RedisServers()
    yield servers
    servers.stop()


@pytest.fixture(params=REDIS_KINDS)
def redis_kind(request: pytest.FixtureRequest) -> str:
    """A test that uses this, directly or through another fixture, runs once on each kind of server."""
    kind: str = request.param
    return kind


@pytest.fixture
def redis_server(redis_servers: RedisServers, redis_kind: str) -> RedisServer:
    return redis_servers.get(redis_kind)


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    from tests.lab.redis import connect

    with connect(redis_server.url) as client:
        yield client


@pytest.fixture
def start_redis(redis_servers: RedisServers) -> Iterator[StartRedis]:
    """Starts servers that only this test uses, to kill, pause or configure: `start_redis(kind, "--appendonly", "yes")`."""
    from example_app.demo.servers import RedisServer

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
    from tests.lab.tls import TlsFront

    with TlsFront(redis_server.port, folder=tmp_path) as front:
        yield front


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    from tests.lab.cluster import Clusters

    clusters = Clusters()
    yield clusters
    clusters.stop()


@pytest.fixture(scope="session")
def cluster_rigs(redis_servers: RedisServers) -> Iterator[ClusterRigs]:
    from tests.lab.cluster import ClusterRigs

    rigs = ClusterRigs(redis_servers)
    yield rigs
    rigs.stop()


@pytest.fixture
def cluster_rig(cluster_rigs: ClusterRigs, redis_kind: str) -> ClusterRig:
    """An empty Cluster, whole again whatever the test before did to it. Break what you like."""
    return cluster_rigs.get(redis_kind)


@pytest.fixture(scope="session")
def sentinel_rigs(redis_servers: RedisServers) -> Iterator[SentinelRigs]:
    from tests.lab.sentinel import SentinelRigs

    rigs = SentinelRigs(redis_servers)
    yield rigs
    rigs.stop()


@pytest.fixture
def sentinel_rig(sentinel_rigs: SentinelRigs, redis_kind: str) -> SentinelRig:
    """Empty and whole, whatever the test before did to it. Break what you like."""
    return sentinel_rigs.get(redis_kind)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server of this test process. Other tests use it after you: use `start_postgres` to kill or reconfigure one."""
    from tests.lab.postgres import PostgresServer, postgres_installation

    with PostgresServer(postgres_installation()) as server:
        yield server


@pytest.fixture(scope="session")
def empty_database(postgres_server: PostgresServer) -> Iterator[LentDatabase]:
    from tests.lab.postgres import LentDatabase

    with closing(LentDatabase(postgres_server)) as database:
        yield database


@pytest.fixture
def postgres_url(empty_database: LentDatabase) -> Iterator[str]:
    """An empty database that only this test uses, for SQLAlchemy with psycopg 3."""
    with empty_database.lent() as url:
        yield url


@pytest.fixture
def start_postgres() -> Iterator[StartPostgres]:
    """Starts servers that only this test uses, to kill, pause or configure: `start_postgres("-c", "lock_timeout=1s")`."""
    from tests.lab.postgres import PostgresServer, postgres_installation

    with ExitStack() as started:

        def start(*arguments: str, environment: Mapping[str, str] | None = None) -> PostgresServer:
            source = postgres_installation()
            return started.enter_context(PostgresServer(source, arguments=arguments, environment=environment))

        yield start


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDbServer]:
    """The server of this test process. Other tests use it after you: use `start_mariadb` to kill or reconfigure one."""
    from tests.lab.mariadb import MariaDbServer, require_mariadb

    with MariaDbServer(require_mariadb()) as server:
        yield server


@pytest.fixture
def mariadb_url(mariadb_server: MariaDbServer) -> Iterator[str]:
    """An empty database that only this test uses, for SQLAlchemy with PyMySQL."""
    with mariadb_server.database() as name:
        yield mariadb_server.url(name)


@pytest.fixture
def start_mariadb() -> Iterator[StartMariaDb]:
    """Starts servers that only this test uses, to kill, pause or configure: `start_mariadb("--sql-mode=")`."""
    from tests.lab.mariadb import MariaDbServer, require_mariadb

    program = require_mariadb()
    with ExitStack() as started:
        yield lambda *arguments: started.enter_context(MariaDbServer(program, arguments=arguments))


@pytest.fixture(scope="session")
def galera_cluster() -> Iterator[GaleraCluster]:
    """The cluster of this test process. Most tests want `galera`."""
    from tests.lab.galera import GaleraCluster

    with GaleraCluster() as cluster:
        yield cluster


@pytest.fixture
def galera(galera_cluster: GaleraCluster) -> GaleraCluster:
    """Three nodes of MariaDB, whole again whatever the test before did to them. Break what you like."""
    galera_cluster.mend()
    return galera_cluster


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """The pooler of this test process, with transaction pooling."""
    from tests.lab.pgbouncer import PgBouncer, require_pgbouncer

    require_pgbouncer()
    with PgBouncer(postgres_server) as bouncer:
        yield bouncer


@pytest.fixture
def pgbouncer_url(postgres_server: PostgresServer, pgbouncer: PgBouncer) -> Iterator[str]:
    """An empty database that only this test uses, behind a PgBouncer with transaction pooling."""
    with postgres_server.database() as name:
        yield pgbouncer.url(name)


@pytest.fixture
def start_pgbouncer() -> Iterator[StartPgBouncer]:
    """Starts poolers that only this test uses, in front of any server: `start_pgbouncer(server, pool_size=1)`."""
    from tests.lab.pgbouncer import PgBouncer, require_pgbouncer

    require_pgbouncer()
    with ExitStack() as started:

        def start(
            server: PostgresServer, *, pool_size: int = 4, pool_mode: PoolMode = "transaction", ignored: str = ""
        ) -> PgBouncer:
            return started.enter_context(PgBouncer(server, pool_size=pool_size, pool_mode=pool_mode, ignored=ignored))

        yield start


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """The broker of this test process: name your queues after your test."""
    from tests.lab.rabbitmq import RabbitServer, require_rabbitmq

    require_rabbitmq()
    with RabbitServer() as server:
        yield server


@pytest.fixture(scope="session")
def clock_folder() -> Iterator[Path]:
    """The folder of the clock library and its clocks, readable for all: a server may run as another user than the test."""
    with tempfile.TemporaryDirectory(prefix="idempotency-clocks-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="session")
def make_wall_clock(clock_folder: Path) -> MakeWallClock:
    """Makes clocks for servers that outlive a test."""
    from tests.lab.clock import WallClock, compiled

    shim = compiled(clock_folder)

    def make() -> WallClock:
        descriptor, name = tempfile.mkstemp(dir=clock_folder)
        os.close(descriptor)
        return WallClock(shim, Path(name))

    return make


@pytest.fixture
def wall_clock(make_wall_clock: MakeWallClock) -> WallClock:
    """A clock for the servers of this test: start them with its `environment`."""
    return make_wall_clock()


@pytest.fixture(scope="session")
def clocked(make_wall_clock: MakeWallClock, redis_servers: RedisServers) -> Iterator[Clocked]:
    from tests.lab.clock import Clocked

    clocked = Clocked(make_wall_clock, redis_servers)
    yield clocked
    clocked.stop()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty store of one kind, and its clock. A test that uses this runs on every kind."""
    from tests.lab.clock import in_this_process, on_server

    with ExitStack() as ends:
        if request.param in ("memory", "sqlite"):
            place = in_this_process(request.param, tmp_path, ends)
        else:
            clock, server = request.getfixturevalue("clocked").get(request.param)
            place = on_server(request.param, clock, server, ends)
        place.set_ahead(0)
        yield place
        place.set_ahead(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    used = getattr(item, "funcargs", {})
    for name in ("redis_server", "postgres_server", "mariadb_server", "pgbouncer", "rabbitmq"):
        if report.failed and name in used:
            report.sections.append((f"{name} log", used[name].log[-2000:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = {
        str(report.longrepr[2]).partition(MISSING)[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and MISSING in report.longrepr[2]
    }
    for reason in sorted(reasons):
        terminalreporter.write_line(f"NOT TESTED, missing service: {reason}", yellow=True, bold=True)


@pytest.fixture
def few_partitions() -> Iterator[None]:
    """Redis stores with 16 partitions, not 1,024: each check of a whole store asks all of them."""
    from flask_idempotency.stores.redis import layout

    def forget() -> None:
        # By how many partitions the keys of a tenant were named.
        layout._tenant_keys.cache_clear()
        layout._prefix.cache_clear()

    # Not by the fixture, which a test may use to undo what it has changed.
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(layout, "PARTITIONS", 16)
        forget()
        yield
    forget()
