"""What is erased, sealed anew or damaged is not replayed out of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Record, SealedBy, StoredPayload, Unknown
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import TieredStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, OTHER_PAYLOAD, PAYLOAD, a_key, a_request, a_token
from tests.stores.cached import PATIENT

SEALED = replace(PAYLOAD, sealed_by=SealedBy("2026", 1))


class Counted(FaultyStore):
    """A memory store that notes what it is asked, and does besides what it can do besides."""

    def __init__(self, clock: FrozenClock) -> None:
        store = MemoryStore(clock)
        super().__init__(store)
        self.data_keys, self.responses, self.ledger = store.data_keys, store.responses, store.ledger


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


@pytest.fixture
def system(clock: FrozenClock) -> Counted:
    return Counted(clock)


@pytest.fixture
def store(system: Counted, cache: RedisReplayCache) -> TieredStore:
    return TieredStore(system, cache)


def cached(store: TieredStore, system: Counted, key: StorageKey, payload: StoredPayload = SEALED) -> None:
    """An answer that the next replay would be given without asking the system."""
    shelf = store.data_keys.read_keys(key.tid)
    if shelf.last == 0:
        store.data_keys.add(key.tid, DataKey(1, "2026", b"wrapped"), store=shelf.store, after=0)
    token = a_token()
    store.claim(a_request(key), token=token, lease=LEASE)
    store.complete(key, token, payload, keep=KEEP)
    replayed(store, key)
    system.calls.clear()
    assert (payload, []) == (replayed(store, key).payload, system.calls)


def replayed(store: TieredStore, key: StorageKey) -> Record:
    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(outcome, Record)
    return outcome


@pytest.mark.parametrize("payload", (SEALED, PAYLOAD), ids=("sealed", "plain"))
def test_an_erased_answer_is_not_replayed_out_of_the_cache(
    store: TieredStore, system: Counted, payload: StoredPayload
) -> None:
    """At once, and in no other tenant's way. What is told as erased is not cached either."""
    key, other = a_key(), a_key()
    cached(store, system, key, payload)
    cached(store, system, other, payload)
    store.data_keys.shred(key.tid)

    assert [True, True] == [replayed(store, key).erased for _ in range(2)]
    assert ["claim", "claim"] == system.verbs()
    assert not replayed(store, other).erased
    assert ["claim", "claim"] == system.verbs()


def test_an_erased_tenant_that_comes_back_is_cached_again(
    store: TieredStore, system: Counted, clock: FrozenClock
) -> None:
    """It was erased until then, and not for ever."""
    tid = a_key().tid
    cached(store, system, a_key(tid=tid))
    store.data_keys.shred(tid)
    clock.advance(1)
    store.data_keys.add(tid, DataKey(2, "2026", b"wrapped"), store=store.data_keys.read_keys(tid).store, after=1)

    cached(store, system, a_key(tid=tid), replace(PAYLOAD, sealed_by=SealedBy("2026", 2)))


def test_what_was_told_as_erased_is_never_kept(
    system: Counted, cache: RedisReplayCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever cache it is: one that has forgotten that a tenant was erased must not be told anew what it had."""
    key, filled = a_key(), list[Record]()
    monkeypatch.setattr(cache, "put", lambda key, record, *, missed_at: filled.append(record))
    store = TieredStore(system, cache)
    token = a_token()
    store.claim(a_request(key), token=token, lease=LEASE)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    assert not replayed(store, key).erased
    before = len(filled)
    store.data_keys.shred(key.tid)

    assert (True, before) == (replayed(store, key).erased, len(filled))
    assert before > 0


class Broken:
    """A cache with a bug."""

    def __init__(self, cache: RedisReplayCache) -> None:
        self.get, self.put, self.forget, self.invalidate = cache.get, cache.put, cache.forget, cache.invalidate

    def erase(self, tid: bytes) -> bool:
        raise KeyError("what")


class Silent(Broken):
    def erase(self, tid: bytes) -> bool:
        return False


@pytest.mark.parametrize("kind", (Broken, Silent))
def test_a_cache_that_does_not_hear_of_it_does_not_keep_keys_from_being_destroyed(
    kind: type[Broken], system: Counted, cache: RedisReplayCache
) -> None:
    """The system says what is erased to whoever asks it; and whoever erases is told to do it again."""
    store, key = TieredStore(system, kind(cache)), a_key()
    cached(store, system, key)

    with pytest.raises(StoreUnavailable, match="did not hear of it"):
        store.data_keys.shred(key.tid)
    assert () == store.data_keys.read_keys(key.tid).keys


def test_an_answer_that_was_sealed_anew_is_not_replayed_as_it_was(store: TieredStore, system: Counted) -> None:
    """The key that it was sealed with may be gone by then."""
    key, anew = a_key(), replace(SEALED, data=b"sealed anew")
    cached(store, system, key)

    assert store.responses.replace(key, SEALED, anew)
    assert anew == replayed(store, key).payload


def test_what_was_condemned_in_the_system_is_not_replayed_out_of_the_cache(store: TieredStore, system: Counted) -> None:
    """Nobody could open it."""
    key = a_key()
    cached(store, system, key)
    store.mark_corrupt(key, SEALED)

    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)


def test_an_answer_that_is_damaged_in_the_cache_alone_is_replayed_by_the_system(
    store: TieredStore, system: Counted
) -> None:
    """What is condemned is compared with what the system has: that is another, and stays."""
    key = a_key()
    cached(store, system, key)
    store.mark_corrupt(key, OTHER_PAYLOAD)

    assert SEALED == replayed(store, key).payload
    assert ["mark_corrupt", "claim"] == system.verbs()


def test_what_the_system_cannot_do_the_whole_cannot_do(clock: FrozenClock, cache: RedisReplayCache) -> None:
    """And says so where it is put together, and not at the first request."""
    store = TieredStore(FaultyStore(MemoryStore(clock)), cache)

    assert [False] * 3 == [hasattr(store, name) for name in ("data_keys", "answers", "ledger")]
