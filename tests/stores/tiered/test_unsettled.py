"""What others have freed, settled or condemned is not replayed out of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Grant, InFlight, Record, Unknown
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import TieredStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    seen,
    stand,
)
from tests.stores.cached import PATIENT
from tests.stores.tiered.test_faults import Broken, HeldUp


class Looked(FaultyStore):
    """A memory store that notes what it is asked, and lets others settle."""

    def __init__(self, clock: FrozenClock) -> None:
        store = MemoryStore(clock)
        super().__init__(store)
        self.recovery, self.expiry, self.task_log = store.recovery, store.expiry, store.task_log
        self.responses = store.responses


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


@pytest.fixture
def system(clock: FrozenClock) -> Looked:
    return Looked(clock)


@pytest.fixture
def store(system: Looked, cache: RedisReplayCache) -> TieredStore:
    return TieredStore(system, cache)


def cached(store: TieredStore, system: Looked, clock: FrozenClock) -> SeenRecord:
    """An answer that the next replay would be given without asking the system."""
    key = a_key()
    stand(store, clock, key, "completed")
    replayed(store, key)
    system.calls.clear()
    replayed(store, key)
    assert system.calls == []
    return seen(system, key)


def replayed(store: TieredStore, key: StorageKey) -> Record:
    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(outcome, Record)
    return outcome


def test_an_answer_whose_key_was_freed_is_not_replayed(store: TieredStore, system: Looked, clock: FrozenClock) -> None:
    """The key runs again, and what comes of it then is cached as ever."""
    answered = cached(store, system, clock)
    key, token = answered.key, a_token()

    assert store.recovery.force_release(answered)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)
    replayed(store, key)
    system.calls.clear()
    assert (replayed(store, key).payload, system.calls) == (OTHER_PAYLOAD, [])


@pytest.mark.parametrize("again", (False, True), ids=("free", "in flight again"))
def test_an_answer_on_its_way_to_the_cache_is_not_kept_once_its_key_was_freed(
    cache: RedisReplayCache, system: Looked, clock: FrozenClock, again: bool
) -> None:
    """Another process replayed it just before, and its fill was stuck on the way."""
    slow = HeldUp(cache)
    late, store, key = TieredStore(system, slow), TieredStore(system, cache), a_key()
    stand(late, clock, key, "completed")
    replayed(late, key)
    assert store.recovery.force_release(seen(system, key))
    if again:
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    slow.arrive()

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight if again else Grant)


def test_an_answer_in_the_place_of_a_condemned_one_is_what_is_replayed(
    store: TieredStore, system: Looked, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """Also when the damaged one comes to the cache late, by a process that read it before it was condemned."""
    slow = HeldUp(cache)
    late = TieredStore(system, slow)
    answered = cached(store, system, clock)
    cache.forget(answered.key)
    replayed(late, answered.key)
    store.mark_corrupt(answered.key, PAYLOAD)
    assert Unknown(CORRUPT) == store.claim(a_request(answered.key), token=a_token(), lease=LEASE)

    condemned = seen(system, answered.key)
    assert store.recovery.resolve(condemned, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
    slow.arrive()
    assert [replayed(store, answered.key).payload for _ in range(2)] == [OTHER_PAYLOAD] * 2


@pytest.mark.parametrize("meanwhile", ("condemned", "sealed anew"))
def test_a_cache_that_is_to_forget_a_key_goes_on_keeping_out_what_was_withdrawn(
    cache: RedisReplayCache, system: Looked, clock: FrozenClock, meanwhile: str
) -> None:
    """Others may find the answer damaged, or seal it anew, just before its key is freed."""
    slow = HeldUp(cache)
    late, other, key = TieredStore(system, slow), TieredStore(system, cache), a_key()
    stand(late, clock, key, "completed")
    replayed(late, key)
    answered = seen(system, key)
    assert cache.invalidate(key, fence=answered.record.fence)
    if meanwhile == "condemned":
        other.mark_corrupt(key, OTHER_PAYLOAD)
    else:
        assert other.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)
    assert system.recovery.force_release(answered)
    slow.arrive()

    assert isinstance(other.claim(a_request(key), token=a_token(), lease=LEASE), Grant)


def test_what_was_settled_anew_has_one_answer_whoever_condemns_the_old_one_once_more(
    store: TieredStore, system: Looked, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """Where the cache is asked and where it is not."""
    slow, key = HeldUp(cache), a_key()
    late = TieredStore(system, slow)
    stand(late, clock, key, "completed")
    replayed(late, key)
    store.mark_corrupt(key, PAYLOAD)
    assert store.recovery.resolve(seen(system, key), token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
    store.mark_corrupt(key, PAYLOAD)
    slow.arrive()

    assert found(system, key) == replayed(store, key)


def test_what_does_not_stand_as_it_was_seen_stays_and_is_replayed(
    store: TieredStore, system: Looked, clock: FrozenClock
) -> None:
    """The cache may have been told in vain: then the system is asked."""
    answered = cached(store, system, clock)
    clock.advance(KEEP)
    stand(store, clock, answered.key, "completed")

    assert not store.recovery.force_release(answered)
    assert replayed(store, answered.key) == found(system, answered.key)


class Silent(Broken):
    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        return False


@pytest.mark.parametrize("kind", (Broken, Silent))
def test_nothing_is_freed_or_settled_that_the_cache_would_go_on_replaying(
    kind: type[Broken], system: Looked, clock: FrozenClock
) -> None:
    """Whoever asks is told to ask again, and can."""
    store = TieredStore(system, kind())
    answered, damaged = a_key(), a_key()
    for key in (answered, damaged):
        stand(system, clock, key, "completed")
    system.mark_corrupt(damaged, PAYLOAD)
    before = [seen(system, key) for key in (answered, damaged)]
    for each in before:
        with pytest.raises(StoreUnavailable, match="Nothing was changed"):
            store.recovery.force_release(each)
    with pytest.raises(StoreUnavailable, match="Nothing was changed"):
        store.recovery.resolve(before[1], token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)

    assert before == [seen(system, key) for key in (answered, damaged)]


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
def test_what_holds_no_answer_is_freed_without_the_cache(
    system: Looked, clock: FrozenClock, standing: Standing
) -> None:
    """It has never been there: a cache that is gone is in no janitor's way."""
    store, key = TieredStore(system, Broken()), a_key()
    stand(system, clock, key, standing)

    assert store.recovery.force_release(seen(system, key))


def test_what_is_quarantined_is_settled_without_the_cache(system: Looked, clock: FrozenClock) -> None:
    """Its answer is the first that there is."""
    store, key = TieredStore(system, Broken()), a_key()
    stand(system, clock, key, "quarantined")

    assert store.recovery.resolve(seen(system, key), token=a_token(), payload=PAYLOAD, keep=KEEP)
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)


class Unnamed(Looked):
    """A system that does not say which it is."""

    def identity(self) -> bytes:
        raise StoreUnavailable("down")


def test_a_cache_that_may_not_be_asked_cannot_be_told(clock: FrozenClock, cache: RedisReplayCache) -> None:
    """Nobody knows here what the key is called there, and other processes may."""
    system, key = Unnamed(clock), a_key()
    stand(system, clock, key, "completed")

    with pytest.raises(StoreUnavailable, match="Nothing was changed"):
        TieredStore(system, cache).recovery.force_release(seen(system, key))


def test_a_cache_that_takes_nothing_more_cannot_be_told(
    store: TieredStore, system: Looked, clock: FrozenClock, redis_client: redis.Redis
) -> None:
    """It is full, or a replica: what it holds stays there."""
    answered = cached(store, system, clock)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable, match="Nothing was changed"):
            store.recovery.force_release(answered)
    finally:
        redis_client.config_set("maxmemory", 0)

    assert store.recovery.force_release(answered)


def test_what_the_system_does_for_its_janitor_the_whole_does(store: TieredStore, system: Looked) -> None:
    """Time ends what is cached by itself, and chores are written down in one place."""
    assert (system.expiry, system.task_log) == (store.expiry, store.task_log)


def test_what_the_system_cannot_do_for_a_janitor_the_whole_cannot_do(
    clock: FrozenClock, cache: RedisReplayCache
) -> None:
    """And says so where it is put together."""
    store = TieredStore(FaultyStore(MemoryStore(clock)), cache)

    assert [hasattr(store, name) for name in ("unsettled", "expiry", "chores")] == [False] * 3
