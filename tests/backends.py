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
from tests.sql_backends import STRATEGIES, mariadb, postgres, sqlite, sqlite_core
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
    "mariadb-insert": mariadb("insert"),
    "mariadb-row_lock": mariadb("row_lock", by_row=True),
}

ALL = ("store", "quotas", "upkeep", "journals")
"""The parts of the contract, see `test_contract.py`. Beside them, `reached` is what comes through any connection."""

OF_SQL = ("store", "quotas", "upkeep")
"""Of SQL, `tests/stores/sql/test_journals.py` holds the journals to their contract."""

HELD_TO: dict[str, tuple[tuple[str, ...], str]] = {
    "memory": (ALL, "a store of its own"),
    "fakeredis": (ALL, "another Lua, for which our scripts have branches"),
    **{f"{kind}-url": (ALL, "a server with commands and a Lua of its own") for kind in REDIS_KINDS},
    **dict.fromkeys(OTHER_WAYS, (("reached",), "the same scripts on the same server, other sockets and other replies")),
    **dict.fromkeys(
        [name for name in OTHER_WAYS if name.endswith("-client")],
        (("reached", "quotas", "upkeep"), "`ClientConnection` sends each command, not only scripts"),
    ),
    **{
        f"{kind}-cluster": (("reached",), "the routes of the first Cluster and the scripts of this server")
        for kind in REDIS_KINDS
    },
    f"{REDIS_KINDS[0]}-cluster": (ALL, "routes by slot, and asks each primary"),
    **dict.fromkeys(TIERED, (("store",), "the cache has a branch for each call: a read, a fault, a lost reply")),
    **{
        f"tiered-{kind}{telling}": (("reached",), "another server; the scripts of the cache are in `test_replay_cache`")
        for kind in REDIS_KINDS[1:]
        for telling in ("", "-telling")
    },
    "tiered-text-client": (("reached",), "the same cache, and other replies"),
    "tiered-cluster": (("reached",), "the same cache on a Cluster"),
    f"tiered-{REDIS_KINDS[0]}-telling": (("store", "journals"), "what tenants have is the system's"),
    "tiered-fakeredis": (("store", "quotas", "upkeep"), "passes on what the system has"),
    "sqlite": (OF_SQL, "SQL of one writer"),
    "sqlite-core": (("reached",), "the same SQL through a `Connection`, which makes other rows"),
    "postgres-insert": (OF_SQL, "SQL of many writers"),
    **dict.fromkeys(
        ("postgres-row_lock", "postgres-advisory"),
        (("store", "quotas", "recount"), "another way to claim and to count; the janitor has the same statements"),
    ),
    "postgres-core": (("reached",), "the same SQL through a `Connection`, which makes other rows"),
    "postgres-repeatable-read": (("reached",), "the same SQL, of which the server refuses more"),
    "postgres-serializable": (("reached", "upkeep"), "refuses every statement that meets another, the janitor's too"),
    "pgbouncer-insert": (OF_SQL, "no statement may need its session"),
    **dict.fromkeys(
        ("pgbouncer-row_lock", "pgbouncer-advisory"),
        (("reached",), "only the claim differs, and no lock may need its session"),
    ),
    "mariadb-insert": (OF_SQL, "SQL of many writers whose updates return nothing"),
    "mariadb-row_lock": (("store", "quotas", "recount"), "fences from a row, as on MySQL and in Galera"),
}
"""What each store is held to, and what differs in it. Stores that differ in their connection run what it can change."""

REACHED = [name for name, (parts, _) in HELD_TO.items() if "reached" in parts]

STORES = [name for name, (parts, _) in HELD_TO.items() if "store" in parts]

KEPT = [name for name, (parts, _) in HELD_TO.items() if "upkeep" in parts]
"""As many of them as differ in how they are looked after."""

OF_THE_MATRIX = ("fakeredis",)
"""Stores of the core that are held to the contract with the matrix: `redis_kinds` have the same scripts in core."""


OF_THE_SLOW_STAGE = {"mariadb-insert": ("quotas", "upkeep")}
"""Parts to which a store of the core is held in the slow stage. `tests/stores/sql/test_mariadb.py`, in core, has what differs
there from PostgreSQL."""


def held_to(*parts: str) -> list[Any]:
    """Return the stores that are held to one of these parts, as parameters."""

    def in_its_stage(name: str) -> Any:
        if name in OF_THE_MATRIX:
            return pytest.param(name, marks=pytest.mark.matrix)
        return pytest.param(name, marks=pytest.mark.slow) if set(parts) & set(OF_THE_SLOW_STAGE.get(name, ())) else name

    return [in_its_stage(name) for name in BACKENDS if set(parts) & set(HELD_TO[name][0])]


@pytest.fixture(params=KEPT)
def make_kept(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a store of one kind, one for each test. Asking for this runs the test on every kind that differs to a janitor."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)
