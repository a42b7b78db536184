"""When the tiered store asks its system, and which committed responses it caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    Callers,
    Grant,
    InFlight,
    Mismatched,
    OtherCaller,
    Record,
    Unknown,
)
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.admin import MemoryHealth
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import REMEMBERED_CLAIMS, Missed, TieredStore
from flask_idempotency.testing import FaultyStore, FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    stand,
)
from tests.stores.cached import PATIENT, completed
from tests.tiered_backends import TellingStore, tiered_on

MEETING_SECONDS = 60.0


@pytest.fixture
def system(clock: FrozenClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock))


@pytest.fixture
def store(system: FaultyStore, cache: RedisReplayCache) -> TieredStore:
    return TieredStore(system, cache)


@pytest.fixture
def telling(clock: FrozenClock, cache: RedisReplayCache) -> TieredStore:
    return tiered_on(TellingStore(clock), cache)


class NamedStore(TellingStore):
    """A system of record that knows its name, unless it is told to fail, and counts who asks."""

    def __init__(self, clock: FrozenClock, name: bytes) -> None:
        super().__init__(clock)
        self.name: bytes | Exception = name
        self.asked = 0

    def identity(self) -> bytes:
        self.asked += 1
        if isinstance(self.name, Exception):
            raise self.name
        return self.name


def cached(cache: RedisReplayCache, key: StorageKey) -> bool:
    return isinstance(cache.get(key), Record)


def test_the_first_request_asks_the_system_twice(
    store: TieredStore, system: FaultyStore, clock: FrozenClock, redis_client: redis.Redis
) -> None:
    stand(store, clock, a_key(), "completed")

    assert (["claim", "complete"], 0) == (system.verbs(), redis_client.dbsize())


def test_the_first_replay_asks_the_system_and_the_next_do_not(
    store: TieredStore, system: FaultyStore, clock: FrozenClock
) -> None:
    key = a_key()
    stand(store, clock, key, "completed")
    clock.advance(100)
    expected = found(system, key)
    before = len(system.calls)

    outcomes = [store.claim(a_request(key), token=a_token(), lease=LEASE) for _ in range(3)]

    assert [expected] * 3 == outcomes
    assert ["claim"] == system.verbs()[before:]


def test_a_hot_replay_takes_one_command_and_no_system_call(
    redis_server: RedisServer, system: FaultyStore, clock: FrozenClock
) -> None:
    with TcpProxy(redis_server.port) as proxy:
        cache = RedisReplayCache(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}", clock=clock)
        store, key = tiered_on(system, cache), a_key()
        stand(store, clock, key, "completed")
        first = store.claim(a_request(key), token=a_token(), lease=LEASE)
        before = proxy.requests, proxy.chunks, len(system.calls)
        hot = store.claim(a_request(key), token=a_token(), lease=LEASE)
        other = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)
        bob = Callers(frozenset({("acme", "bob")}))
        others = store.claim(a_request(key, callers=bob), token=a_token(), lease=LEASE)
        cache.close()

        assert first == hot
        assert (Mismatched(first_seen=clock.now), OtherCaller(first_seen=clock.now)) == (other, others)
        assert (before[0] + 3, before[1] + 3, before[2]) == (proxy.requests, proxy.chunks, len(system.calls))


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, quarantine"))
def test_an_unfinished_record_is_never_cached(
    store: TieredStore, clock: FrozenClock, redis_client: redis.Redis, standing: Standing
) -> None:
    """It would have two homes, and they would soon differ."""
    key = a_key()
    stand(store, clock, key, standing)
    outcomes = [
        store.claim(a_request(key, fingerprint=fingerprint), token=a_token(), lease=LEASE)
        for fingerprint in (a_request(key).fingerprint, OTHER_FINGERPRINT)
    ]

    assert isinstance(outcomes[0], InFlight | Unknown)
    assert isinstance(outcomes[1], Mismatched)
    assert redis_client.dbsize() == 0


def test_a_read_goes_to_the_system(store: TieredStore, clock: FrozenClock, cache: RedisReplayCache) -> None:
    key = a_key()
    cache.put(key, completed(clock), missed_at=int(clock.now * 1_000_000))

    assert store.read(key) is None


def test_a_system_with_callbacks_has_its_responses_cached_at_once(
    telling: TieredStore, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    key = a_key()
    token = stand(telling, clock, key, "in flight")
    clock.advance(5)
    telling.complete(key, token, PAYLOAD, keep=KEEP)

    hot = cache.get(key)

    # Counted from the claim, before which the cache told the time: five seconds less than it could be, never more.
    assert replace(found(telling, key), remaining=KEEP - 5) == hot


def test_a_repeated_completion_caches_the_first_response(
    telling: TieredStore, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """Its reply was lost. Another answer that comes with the repetition is nobody's."""
    key = a_key()
    token = stand(telling, clock, key, "in flight")
    MemoryStore.complete(telling._system, key, token, PAYLOAD, keep=KEEP)  # type: ignore[arg-type]
    telling.complete(key, token, OTHER_PAYLOAD, keep=KEEP)

    assert found(telling, key) == cache.get(key)
    assert PAYLOAD == found(telling, key).payload


def test_a_record_committed_elsewhere_is_cached_on_callback(
    store: TieredStore, system: FaultyStore, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    key = a_key()
    token = stand(store, clock, key, "in flight")
    system.complete(key, token, PAYLOAD, keep=KEEP)
    record = found(system, key)

    store.committed(key, record)

    assert record == cache.get(key)


def test_a_response_of_another_process_is_cached_at_its_first_replay(
    store: TieredStore, system: FaultyStore, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    key = a_key()
    stand(system, clock, key, "completed")

    store.committed(key, found(system, key))
    assert not cached(cache, key)
    store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert cached(cache, key)


def test_a_late_commit_callback_is_not_cached_for_a_reused_key(
    store: TieredStore, system: FaultyStore, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """The next owner's miss came after the question, and says nothing of this answer's end."""
    key = a_key()
    system.complete(key, stand(store, clock, key, "in flight"), PAYLOAD, keep=KEEP)
    late = found(system, key)
    clock.advance(KEEP)
    stand(store, clock, key, "in flight")

    store.committed(key, late)

    assert not cached(cache, key)


def test_only_so_many_claims_are_remembered(telling: TieredStore, cache: RedisReplayCache, clock: FrozenClock) -> None:
    """The oldest is forgotten: a process that never completes what it claims must not grow for ever."""
    first, last = a_key(), a_key()
    tokens = {first: stand(telling, clock, first, "in flight")}
    for _ in range(REMEMBERED_CLAIMS - 1):
        telling._remember(a_key(), a_token(), 0)
    tokens[last] = stand(telling, clock, last, "in flight")
    for key, token in tokens.items():
        telling.complete(key, token, PAYLOAD, keep=KEEP)

    assert (False, True) == (cached(cache, first), cached(cache, last))


def test_settled_claims_are_not_remembered(telling: TieredStore, clock: FrozenClock) -> None:
    stand(telling, clock, a_key(), "completed")
    key = a_key()
    telling.release(key, stand(telling, clock, key, "in flight"))

    assert not telling._missed


def test_systems_that_share_a_cache_find_only_their_own_responses(cache: RedisReplayCache, clock: FrozenClock) -> None:
    first, second = (tiered_on(NamedStore(clock, name), cache) for name in (b"first", b"second"))
    key = a_key()
    stand(first, clock, key, "completed")

    outcome = second.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)

    assert isinstance(outcome, Grant)
    assert isinstance(first.claim(a_request(key), token=a_token(), lease=LEASE), Record)


def test_processes_of_one_system_share_their_responses(cache: RedisReplayCache, clock: FrozenClock) -> None:
    system = NamedStore(clock, b"the one")
    key = a_key()
    stand(tiered_on(system, cache), clock, key, "completed")
    system.claim = lambda *_, **__: pytest.fail("the system was asked")  # type: ignore[method-assign]

    outcome = tiered_on(system, cache).claim(a_request(key), token=a_token(), lease=LEASE)

    assert isinstance(outcome, Record)


def test_a_system_is_asked_for_its_identity_once(cache: RedisReplayCache, clock: FrozenClock) -> None:
    system = NamedStore(clock, b"the one")
    store = tiered_on(system, cache)
    for _ in range(3):
        key = a_key()
        stand(store, clock, key, "completed")
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert 1 == system.asked


@pytest.mark.parametrize("error", (StoreUnavailable("it is down"), RuntimeError("s3cret")))
def test_no_cache_lookup_before_the_system_is_identified(
    cache: RedisReplayCache,
    clock: FrozenClock,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    system = NamedStore(clock, b"the one")
    system.name = error
    store, key = tiered_on(system, cache), a_key()
    stand(store, clock, key, "completed")
    assert 0 == redis_client.dbsize()
    system.name = b"the one"

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert 1 == redis_client.dbsize()
    assert "cannot read the store's identity" in caplog.text.lower()
    assert "s3cret" not in caplog.text


class FrontedStore(NamedStore):
    """A system of record that is to remember that it is cached, and cannot."""

    def note_cache(self) -> None:
        raise StoreUnavailable("read-only")

    def has_cache(self) -> bool:
        return False


def test_no_response_is_cached_while_other_hosts_ignore_the_cache(
    cache: RedisReplayCache, clock: FrozenClock, redis_client: redis.Redis
) -> None:
    """They could free a key whose answer is replayed on."""
    store, key = tiered_on(FrontedStore(clock, b"the one"), cache), a_key()
    stand(store, clock, key, "completed")
    for _ in range(2):
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    assert 0 == redis_client.dbsize()


def test_a_call_waits_only_once_for_a_system_that_is_down(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Each claim finds out by itself that it still is; the question is put again after one got an answer."""
    system, claim = NamedStore(clock, b"the one"), NamedStore.claim
    system.name = StoreUnavailable("it is down")
    store = tiered_on(system, cache)

    def refuse(*_: object, **__: object) -> StoreOutcome:
        raise StoreUnavailable("it is down")

    system.claim = refuse  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    assert 1 == system.asked

    system.claim = claim.__get__(system)  # type: ignore[method-assign]
    for _ in range(2):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    assert 2 == system.asked


class ProbedCache:
    """Says this to whoever looks."""

    def __init__(self, said: Record | Missed | Exception) -> None:
        self.said = said

    def get(self, key: StorageKey) -> Record | Missed:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        raise AssertionError("looking changes nothing")

    def forget(self, key: StorageKey) -> None:
        raise AssertionError("looking changes nothing")

    def invalidate(self, key: StorageKey, fence: int) -> bool:
        raise AssertionError("looking changes nothing")

    def erase(self, tid: bytes) -> bool:
        raise AssertionError("looking changes nothing")


@pytest.mark.parametrize(
    ("said", "verdict"),
    (
        pytest.param(Missed(at=5), Verdict.FINE, id="answers"),
        pytest.param(completed(FrozenClock()), Verdict.FINE, id="has something"),
        pytest.param(Missed(), Verdict.ADVICE, id="says nothing"),
        pytest.param(OSError("redis://:password@host"), Verdict.ADVICE, id="fails"),
    ),
)
def test_an_unreachable_cache_is_advice(said: Record | Missed | Exception, verdict: Verdict) -> None:
    [found] = TieredStore(FaultyStore(MemoryStore()), ProbedCache(said)).health.findings()

    assert ("replays", verdict, verdict is not Verdict.FINE) == (found.check, found.verdict, bool(found.remedy))
    assert "password" not in found.text


def test_findings_of_the_system_come_first() -> None:
    findings = TieredStore(MemoryStore(), ProbedCache(Missed(at=5))).health.findings()

    assert [*MemoryHealth().findings()] == list(findings[:-1])
    assert "replays" == findings[-1].check
