"""Every store that the contract is run on. A new store is one more entry in `BACKENDS`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import fakeredis
import pytest
import redis
import valkey
from redis._parsers import _RESP2Parser, _RESP3Parser

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.store import Clock, Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.store import RedisStore
from tests.forgiving import FORGIVING
from tests.lab.cluster import Clusters
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect
from tests.lab.tls import TlsFront
from tests.sql_backends import STRATEGIES, postgres, sqlite, sqlite_core
from tests.tiered_backends import TIERED

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
            client: redis.Redis = make_client(url)
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


def cluster(kind: str) -> Backend:
    """By a URL on one kind of server, and through redis-py's client on the others."""

    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
        clusters: Clusters = request.getfixturevalue("clusters")

        def make(clock: Clock) -> Store:
            url = f"redis+cluster://127.0.0.1:{clusters.get(kind).port}"
            reached = url if kind == REDIS_KINDS[0] else clusters.client(kind)
            store = RedisStore(reached, clock=clock, rules=FORGIVING)
            ends.callback(store.close)
            return store

        return make

    return backend


WAYS: dict[str, Connected] = {
    "socket": by_socket,
    "tls": by_tls,
    "resp3-python": by_python_parser(3),
    "resp2-python": by_python_parser(2),
    "text-client": by_text_client,
    "valkey-client": by_valkey_client,
}

TRANSPORTS = ("socket", "tls")
"""Ways that carry the same bytes; the others hand us answers that are made up otherwise."""

OTHER_WAYS = {
    f"{REDIS_KINDS[number % len(REDIS_KINDS)]}-{way}": on(REDIS_KINDS[number % len(REDIS_KINDS)], connected)
    for number, (way, connected) in enumerate(WAYS.items())
}
"""Each on one kind of server, in turns: what a server does is the same in all of them."""

BACKENDS: dict[str, Backend] = {
    "memory": memory,
    "fakeredis": fake,
    **{f"{kind}-url": on(kind, by_url) for kind in REDIS_KINDS},
    **OTHER_WAYS,
    **{f"{kind}-cluster": cluster(kind) for kind in REDIS_KINDS},
    **TIERED,
    "sqlite": sqlite,
    "sqlite-core": sqlite_core,
    **{f"postgres-{strategy}": postgres(strategy) for strategy in STRATEGIES},
    "postgres-core": postgres("insert", driver_cursor=False),
    "postgres-repeatable-read": postgres("insert", isolation="repeatable read"),
    "postgres-serializable": postgres("insert", isolation="serializable"),
    **{f"pgbouncer-{strategy}": postgres(strategy, pooled=True) for strategy in STRATEGIES},
}

REACHED = [
    name
    for name in BACKENDS
    if name.endswith(("-repeatable-read", *TRANSPORTS)) or name in ("pgbouncer-row_lock", "pgbouncer-advisory")
]
"""Other ways to stores that are held to the whole contract in a way of their own."""

STORES = [name for name in BACKENDS if name not in REACHED]

SYSTEMS = [name for name in STORES if name not in TIERED or name == "tiered-fakeredis"]
"""Of tiered stores one: what tenants have is the system's, and `test_tiered_upkeep.py` has what the cache adds."""

_THE_SAME_TO_A_JANITOR = ("-python", "-core", "_lock", "-advisory", *(f"{kind}-cluster" for kind in REDIS_KINDS[1:]))
"""Other ways to the same server, and other ways to claim."""

KEPT = [name for name in SYSTEMS if not name.endswith(_THE_SAME_TO_A_JANITOR)]
"""As many of them as differ in how they are looked after."""


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a store of one kind, one for each test. Asking for this runs the test on every kind."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.fixture(params=REACHED)
def make_reached(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The same for what depends on how a store is reached."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.fixture(params=SYSTEMS)
def make_system(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The same for what a store can do besides being one, and which differs by how it claims."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.fixture(params=KEPT)
def make_kept(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The same for what a store does for its janitor, and for what is in it."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.fixture(params=[name for name in SYSTEMS if name not in KEPT])
def make_owned(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """The other systems."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)
