"""Tiered stores to run the contract on: whatever befalls the cache, they keep what the system of record promises."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
import redis

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, StoredPayload
from flask_idempotency.engine.store import Clock, Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import ReplayCache, TieredStore
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect

Reached = Callable[[pytest.FixtureRequest, ExitStack], Any]


class TellingStore(MemoryStore):
    """A memory store that calls back with each record that it has completed, as a transaction does after its commit."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.on_committed: list[Callable[[StorageKey, Record], None]] = []

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        super().complete(key, token, payload, keep=keep, remember=remember)
        record = self.read(key)
        assert record is not None
        for callback in self.on_committed:
            callback(key, record)


def tiered_on(system: Store, cache: ReplayCache) -> TieredStore:
    """Return a tiered store that caches what this system calls back with."""
    store = TieredStore(system, cache)
    if isinstance(system, TellingStore):
        system.on_committed.append(store.committed)
    return store


class Flushed(redis.Redis):
    """Redis loses everything before each script: what was filled is never there."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "EVALSHA":
            self.flushall()
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class Mute(redis.Redis):
    """Redis does all that it is told, and nobody hears of it."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        raise redis.ConnectionError("the reply was lost, as this test asked")


class FillsUnheard(redis.Redis):
    """Only the replies to fills are lost: what they filled in is replayed all the same."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if answer == b"FILLED":
            raise redis.ConnectionError("the reply was lost, as this test asked")
        return answer


def tiered(reached: Reached, system: Callable[[Clock], Store] = MemoryStore) -> Any:
    """A backend: see `tests/backends.py`."""

    def backend(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Clock], Store]:
        server = reached(request, ends)

        def make(clock: Clock) -> Store:
            # Whenever it is asked the time, every pause is over: no failure spares the next call from failing.
            cache = RedisReplayCache(server, clock=clock, monotonic=count(step=60).__next__)
            ends.callback(cache.close)
            return tiered_on(system(clock), cache)

        return make

    return backend


def server_of(kind: str) -> Reached:
    def reached(request: pytest.FixtureRequest, ends: ExitStack) -> str:
        servers: RedisServers = request.getfixturevalue("redis_servers")
        # More time than a cache gets otherwise: sixteen threads on two cores would sometimes need it.
        return servers.get(kind).url + "?socket_timeout=5&socket_connect_timeout=5"

    return reached


def client_of(make: Callable[..., Any], kind: str = REDIS_KINDS[0], **options: Any) -> Reached:
    def reached(request: pytest.FixtureRequest, ends: ExitStack) -> Any:
        return ends.enter_context(make(server_of(kind)(request, ends), **options))

    return reached


def cluster(request: pytest.FixtureRequest, ends: ExitStack) -> Any:
    client: Any = redis.RedisCluster.from_url(request.getfixturevalue("clusters").get(REDIS_KINDS[0]).url)
    ends.callback(client.close)
    return client


def fake(request: pytest.FixtureRequest, ends: ExitStack) -> Any:
    from tests.backends import OneAtATime

    return ends.enter_context(OneAtATime())


def dead(request: pytest.FixtureRequest, ends: ExitStack) -> str:
    """A port of our own on which nobody listens."""
    closed = ends.enter_context(socket.socket())
    closed.bind(("127.0.0.1", 0))
    return f"redis://127.0.0.1:{closed.getsockname()[1]}/0"


TIERED: dict[str, Any] = {
    "tiered-fakeredis": tiered(fake),
    **{f"tiered-{kind}": tiered(server_of(kind)) for kind in REDIS_KINDS},
    **{f"tiered-{kind}-telling": tiered(server_of(kind), TellingStore) for kind in REDIS_KINDS},
    "tiered-text-client": tiered(client_of(connect, decode_responses=True), TellingStore),
    "tiered-cluster": tiered(cluster, TellingStore),
    "tiered-dead": tiered(dead, TellingStore),
    "tiered-flushed": tiered(client_of(Flushed.from_url), TellingStore),
    "tiered-mute": tiered(client_of(Mute.from_url), TellingStore),
    "tiered-fills-unheard": tiered(client_of(FillsUnheard.from_url), TellingStore),
}
