"""A cache that is late, killed, frozen, spoilt, emptied or wrong: the answers are those of the system alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Self

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, Record
from flask_idempotency.engine.store import Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import Missed, TieredStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    stand,
)
from tests.lab.redis import StartRedis
from tests.stores.weather import FATES, Fate, Weather
from tests.tiered_backends import TellingStore, tiered_on

A_KEY = a_key()


@pytest.fixture
def system(clock: FrozenClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock))


@pytest.fixture
def store(system: FaultyStore, cache: RedisReplayCache) -> TieredStore:
    return TieredStore(system, cache)


class HeldUp:
    """A cache whose fills arrive when the test says so."""

    def __init__(self, cache: RedisReplayCache) -> None:
        self.get = cache.get
        self.forget = cache.forget
        self.invalidate = cache.invalidate
        self.erase = cache.erase
        self._cache = cache
        self._fills: list[Callable[[], None]] = []

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        self._fills.append(lambda: self._cache.put(key, record, missed_at=missed_at))

    def arrive(self) -> None:
        while self._fills:
            self._fills.pop()()


@pytest.mark.parametrize("settled", (False, True), ids=("in flight again", "completed again"))
@pytest.mark.parametrize("telling", (False, True), ids=("replayed", "completed"))
def test_a_late_fill_of_a_reused_key_is_dropped(
    cache: RedisReplayCache, clock: FrozenClock, settled: bool, telling: bool
) -> None:
    """It was stuck in front of a frozen server while the answer's life ended and the key was used again."""
    slow = HeldUp(cache)
    system = TellingStore(clock) if telling else MemoryStore(clock)
    late, store, key = tiered_on(system, slow), tiered_on(system, cache), a_key()
    stand(late, clock, key, "completed")
    late.claim(a_request(key), token=a_token(), lease=LEASE)
    clock.advance(KEEP)
    token = stand(store, clock, key, "in flight")
    if settled:
        store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    slow.arrive()

    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert found(store, key) == outcome if settled else isinstance(outcome, InFlight)


class Broken:
    """A cache with a bug."""

    def get(self, key: StorageKey) -> Record | Missed:
        raise KeyError("what")

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        raise KeyError("what")

    def forget(self, key: StorageKey) -> None:
        raise KeyError("what")

    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        raise KeyError("what")

    def erase(self, tid: bytes) -> bool:
        raise KeyError("what")


class BrokenFill(Broken):
    def get(self, key: StorageKey) -> Record | Missed:
        return Missed(at=0)


@pytest.mark.parametrize("broken", (Broken, BrokenFill))
def test_a_bug_in_the_cache_is_logged_and_requests_succeed(
    clock: FrozenClock, caplog: pytest.LogCaptureFixture, broken: type[Broken]
) -> None:
    """A payment is not refused because its answer cannot be found sooner."""
    store, key = tiered_on(TellingStore(clock), broken()), a_key()
    token = a_token()
    assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant)
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert {"ERROR"} == {record.levelname for record in caplog.records}
    assert "KeyError" in caplog.text


def test_an_outage_of_the_system_refuses_claims(store: TieredStore, system: FaultyStore, clock: FrozenClock) -> None:
    hot = a_key()
    stand(store, clock, hot, "completed")
    store.claim(a_request(hot), token=a_token(), lease=LEASE)
    system.down = True

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    assert isinstance(store.claim(a_request(hot), token=a_token(), lease=LEASE), Record)


class FrozenServer:
    """Accepts every connection, as the kernel does for a stopped process, and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._socket.setblocking(False)
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}/0"
        self._accepted: list[socket.socket] = []

    def connections(self) -> int:
        """How many have come so far."""
        with suppress(BlockingIOError):
            while True:
                self._accepted.append(self._socket.accept()[0])
        return len(self._accepted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in (self._socket, *self._accepted):
            line.close()


def test_a_frozen_server_costs_one_timeout_per_pause(clock: FrozenClock) -> None:
    """Of a hundred requests in each pause one waits, on one connection, for one time-out; the others do not notice."""
    ticking = FrozenClock()
    with FrozenServer() as server:
        cache = RedisReplayCache(server.url, clock=clock, monotonic=ticking)
        store, waited = TieredStore(MemoryStore(clock), cache), []
        for pause in (0, 1, 2, 4):
            ticking.advance(pause)
            for _ in range(100):
                stand(store, clock, a_key(), "completed")
            waited.append(server.connections())
        cache.close()

    assert [1, 2, 3, 4] == waited


def test_a_stopped_server_costs_no_request_and_is_used_again(start_redis: StartRedis, redis_kind: str) -> None:
    server, clock, ticking = start_redis(redis_kind), FrozenClock(), FrozenClock()
    cache = RedisReplayCache(server.url, clock=clock, monotonic=ticking)
    system = FaultyStore(MemoryStore(clock))
    store, key = TieredStore(system, cache), a_key()
    stand(store, clock, key, "completed")
    store.claim(a_request(key), token=a_token(), lease=LEASE)
    server.pause()
    stopped = [store.claim(a_request(key), token=a_token(), lease=LEASE) for _ in range(10)]
    server.resume()

    assert [found(system, key)] * 10 == stopped
    for _ in range(100):
        ticking.advance(60)
        before = len(system.calls)
        assert found(store, key) == store.claim(a_request(key), token=a_token(), lease=LEASE)
        if system.verbs()[before:] == ["read"]:
            break
    cache.close()
    assert system.verbs()[before:] == ["read"], "the cache was never used again"


def story(store: Store, clock: FrozenClock) -> list[object]:
    """What a key's two lives look like to those who ask."""
    key, tokens = A_KEY, iter(bytes([number]) * 16 for number in range(100))

    def ask(fingerprint: bytes = FINGERPRINT, token: bytes | None = None) -> object:
        return store.claim(a_request(key, fingerprint=fingerprint), token=token or next(tokens), lease=LEASE)

    told: list[object] = []
    for payload in (PAYLOAD, OTHER_PAYLOAD):
        owner = next(tokens)
        told += [ask(token=owner), ask()]
        store.complete(key, owner, payload, keep=KEEP)
        told += [ask(), ask(), ask(OTHER_FINGERPRINT)]
        clock.advance(KEEP - 1)
        told += [ask(), ask(), ask(OTHER_FINGERPRINT)]
        clock.advance(1)
    return told


@pytest.mark.parametrize("system", (MemoryStore, TellingStore))
@pytest.mark.parametrize("fate", FATES)
def test_a_cache_fault_at_any_call_changes_no_outcome(
    redis_server: RedisServer, system: type[MemoryStore], fate: Fate
) -> None:
    alone = FrozenClock()
    expected = story(MemoryStore(alone), alone)

    for nth in range(100):
        for lasting in (False, True):
            clock = FrozenClock()
            with Weather.from_url(redis_server.url) as client:
                client.flushall()
                client.expect([*["fine"] * nth, fate], after=fate if lasting else "fine")
                cache = RedisReplayCache(client, clock=clock, monotonic=count(step=60).__next__)
                assert expected == story(tiered_on(system(clock), cache), clock), f"{fate} at command {nth}"
                if client.unspent:
                    return  # The story has no further command.
