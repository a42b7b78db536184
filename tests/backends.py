"""Every store that the contract is run on. A new store is one more entry in `BACKENDS`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import fakeredis
import pytest
import redis
import valkey
from redis._parsers import _RESP2Parser, _RESP3Parser
from sqlalchemy import create_engine

from example_app.servers import RedisServer, server_programs
from flask_idempotency.engine.clock import Clock
from flask_idempotency.engine.ports import Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from tests.forgiving import FORGIVING
from tests.pgbouncer import PgBouncer
from tests.postgres import PostgresServer
from tests.services import REDIS_KINDS, RedisServers, connect
from tests.tiered_backends import TIERED
from tests.tls_front import TlsFront

CLUSTER_SECONDS = 20.0

MakeStore: TypeAlias = Callable[[Clock], Store]
Backend: TypeAlias = Callable[[pytest.FixtureRequest, ExitStack], MakeStore]
Connected: TypeAlias = Callable[[RedisServer, pytest.FixtureRequest, ExitStack], Any]


def memory(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
    return MemoryStore


class OneAtATime(fakeredis.FakeRedis):
    """fakeredis in one thread at a time, as a server would run it: left to itself it fails under many, once in forty."""

    turn = threading.Lock()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with self.turn:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, *args: Any, **options: Any) -> Any:
        pipeline = super().pipeline(*args, **options)
        execute = pipeline.execute

        def in_turn(*args: Any, **options: Any) -> Any:
            with self.turn:
                return execute(*args, **options)

        pipeline.execute = in_turn  # type: ignore[method-assign]
        return pipeline


def fake(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
    """Quick, and wherever no server runs. Its Lua differs from the servers' in a third of all details."""
    client = ends.enter_context(OneAtATime())
    return lambda clock: RedisStore(client, clock=clock, rules=FORGIVING)


def on(kind: str, connected: Connected) -> Backend:
    """A store on this kind of server, reached in this way: by a URL, or by a client of the application's own."""

    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
        servers: RedisServers = request.getfixturevalue("redis_servers")
        reached = connected(servers.get(kind), request, ends)

        def make(clock: Clock) -> Store:
            store = RedisStore(reached, clock=clock, rules=FORGIVING)
            ends.callback(store.close)
            return store

        return make

    return backend


def by_url(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> str:
    return server.url


def by_socket(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> str:
    return server.unix_url


def by_tls(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> str:
    folder: Path = request.getfixturevalue("tmp_path")
    return ends.enter_context(TlsFront(server.port, folder=folder)).url


def by_python_parser(protocol: int) -> Connected:
    """As on a machine without hiredis."""

    def connected(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> str:
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        parser = {2: _RESP2Parser, 3: _RESP3Parser}[protocol]

        def make(url: str) -> redis.Redis:
            client = make_client(url)
            client.connection_pool.connection_kwargs["parser_class"] = parser
            return client

        monkeypatch.setattr("flask_idempotency.stores.redis.store.make_client", make)
        return f"{server.url}?protocol={protocol}"

    return connected


def by_text_client(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> redis.Redis:
    """As applications make it that keep text in Redis."""
    client = connect(server.url, decode_responses=True)
    ends.callback(client.close)
    return client


def by_valkey_client(server: RedisServer, request: pytest.FixtureRequest, ends: ExitStack) -> Any:
    return ends.enter_context(valkey.Valkey.from_url(server.url))


class Clusters:
    """Clusters of one server, by kind. They refuse a script whose keys are not in one slot, as larger ones would."""

    def __init__(self) -> None:
        self._running: dict[str, RedisServer] = {}

    def get(self, kind: str) -> RedisServer:
        if kind not in self._running:
            server = self._running[kind] = RedisServer(server_programs()[kind], arguments=["--cluster-enabled", "yes"])
            with connect(server.url) as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(16384))
                deadline = time.monotonic() + CLUSTER_SECONDS
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    assert time.monotonic() < deadline, "the Cluster of one never said that it is ready"
        return self._running[kind]

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.stop()


def cluster(kind: str) -> Backend:
    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
        clusters: Clusters = request.getfixturevalue("clusters")
        client: Any = redis.RedisCluster.from_url(clusters.get(kind).url)
        ends.callback(client.close)
        return lambda clock: RedisStore(client, clock=clock, rules=FORGIVING)

    return backend


def make_tables(url: str) -> None:
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()


def sqlite(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
    folder: Path = request.getfixturevalue("tmp_path")
    url = f"sqlite:///{folder / 'records.sqlite'}"
    make_tables(url)
    return stores_in(url, ends)


def stores_in(url: str, ends: ExitStack, *, strategy: str = "insert") -> MakeStore:
    def make(clock: Clock) -> Store:
        store = SqlStore(Database(url), strategy=strategy, clock=clock)
        ends.callback(store.close)
        return store

    return make


class SqlDatabases:
    """Databases with our tables on one server, by what they set for who connects. Made once: the contract needs no
    empty ones."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._made: dict[str, str] = {}

    def get(self, isolation: str) -> str:
        if isolation not in self._made:
            name = f"contract_{len(self._made)}"
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


def postgres(strategy: str, *, isolation: str = "read committed", pooled: bool = False) -> Backend:
    """On a server by this strategy; pooled, behind a PgBouncer that hands out its connections by the transaction."""

    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
        databases: SqlDatabases = request.getfixturevalue("sql_databases")
        server: PostgresServer | PgBouncer = request.getfixturevalue("pgbouncer" if pooled else "postgres_server")
        return stores_in(server.url(databases.get(isolation)), ends, strategy=strategy)

    return backend


STRATEGIES = ("insert", "row_lock", "advisory")

WAYS: dict[str, Connected] = {
    "url": by_url,
    "socket": by_socket,
    "tls": by_tls,
    "resp2-python": by_python_parser(2),
    "resp3-python": by_python_parser(3),
    "text-client": by_text_client,
    "valkey-client": by_valkey_client,
}

BACKENDS: dict[str, Backend] = {
    "memory": memory,
    "fakeredis": fake,
    **{f"{kind}-{way}": on(kind, connected) for kind in REDIS_KINDS for way, connected in WAYS.items()},
    **{f"{kind}-cluster": cluster(kind) for kind in REDIS_KINDS},
    **TIERED,
    "sqlite": sqlite,
    **{f"postgres-{strategy}": postgres(strategy) for strategy in STRATEGIES},
    "postgres-repeatable-read": postgres("insert", isolation="repeatable read"),
    "postgres-serializable": postgres("insert", isolation="serializable"),
    **{f"pgbouncer-{strategy}": postgres(strategy, pooled=True) for strategy in STRATEGIES},
}


@pytest.fixture(params=list(BACKENDS))
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a store of one kind. Asking for this runs the test on every kind."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


SYSTEMS = [name for name in BACKENDS if name not in TIERED or name == "tiered-fakeredis"]
"""Of tiered stores one: what tenants have is the system's, and `test_tiered_upkeep.py` has what the cache adds."""


_THE_SAME_TO_A_JANITOR = ("-socket", "-tls", "-python", "_lock", "-advisory", "-repeatable-read")
"""Other ways to the same server, and other ways to claim."""

KEPT = [name for name in SYSTEMS if not name.endswith(_THE_SAME_TO_A_JANITOR)]
"""As many of them as differ in how they are looked after."""


@pytest.fixture(params=KEPT)
def make_kept(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The same for what a store does for its janitor."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.fixture(params=SYSTEMS)
def make_system(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The same for what a store can do besides being one."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)
