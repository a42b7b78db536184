"""Responses that are released, resolved, erased, sealed again or marked corrupt are not replayed from the cache."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from flask_idempotency.engine.capabilities import DataKey, DataKeys, Recovery, Responses, SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Grant, InFlight, Record, SealedBy, StoredPayload, Unknown
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.sql.admin.data_keys import SqlDataKeys
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.tiered import CachedDataKeys, CachedRecovery, CachedResponses, TieredStore
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
    stand,
)
from tests.stores.tiered.test_faults import Broken, HeldUp


@pytest.mark.parametrize(
    ("cached", "protocol", "passed_on"),
    (
        (CachedRecovery, Recovery, "about_completed counts expired_leases next_for_resolver quarantine_expired scan"),
        (CachedDataKeys, DataKeys, "add count delete disable read_keys sample wrapped_by_other"),
        (CachedResponses, Responses, "count scan"),
    ),
)
def test_each_method_tells_the_cache_or_is_known_not_to_affect_it(cached: type, protocol: type, passed_on: str) -> None:
    """`__getattr__` passes on what these classes do not define. Does a new method change what the cache may replay?"""
    methods = {name for name in vars(protocol) if not name.startswith("_")}

    assert {*passed_on.split()} == methods - vars(cached).keys()


class FullSystem(FaultyStore):
    """A memory store with all that a memory store offers, which counts its calls."""

    def __init__(self, clock: FrozenClock) -> None:
        store = MemoryStore(clock)
        super().__init__(store)
        self.recovery, self.expiry, self.task_log = store.recovery, store.expiry, store.task_log
        self.data_keys, self.responses, self.ledger = store.data_keys, store.responses, store.ledger


@pytest.fixture
def system(clock: FrozenClock) -> FullSystem:
    return FullSystem(clock)


@pytest.fixture
def store(system: FullSystem, cache: RedisReplayCache) -> TieredStore:
    return TieredStore(system, cache)


def cached(store: TieredStore, system: FullSystem, clock: FrozenClock) -> SeenRecord:
    """An answer that the next replay would be given without asking the system."""
    key = a_key()
    stand(store, clock, key, "completed")
    replayed(store, key)
    system.calls.clear()
    replayed(store, key)
    assert system.calls == []
    return SeenRecord(key, found(system, key))


def replayed(store: TieredStore, key: StorageKey) -> Record:
    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(outcome, Record)
    return outcome


def test_a_response_of_a_released_key_is_not_replayed(
    store: TieredStore, system: FullSystem, clock: FrozenClock
) -> None:
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
def test_a_late_fill_of_a_released_key_is_dropped(
    cache: RedisReplayCache, system: FullSystem, clock: FrozenClock, again: bool
) -> None:
    """Another process replayed it just before, and its fill was stuck on the way."""
    slow = HeldUp(cache)
    late, store, key = TieredStore(system, slow), TieredStore(system, cache), a_key()
    stand(late, clock, key, "completed")
    replayed(late, key)
    assert store.recovery.force_release(SeenRecord(key, found(system, key)))
    if again:
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    slow.arrive()

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight if again else Grant)


def test_a_resolved_response_replaces_a_corrupt_one(
    store: TieredStore, system: FullSystem, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """Also when the damaged one comes to the cache late, by a process that read it before it was condemned."""
    slow = HeldUp(cache)
    late = TieredStore(system, slow)
    answered = cached(store, system, clock)
    cache.forget(answered.key)
    replayed(late, answered.key)
    store.mark_corrupt(answered.key, PAYLOAD)
    assert Unknown(CORRUPT) == store.claim(a_request(answered.key), token=a_token(), lease=LEASE)

    condemned = SeenRecord(answered.key, found(system, answered.key))
    assert store.recovery.resolve(condemned, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
    slow.arrive()
    assert [replayed(store, answered.key).payload for _ in range(2)] == [OTHER_PAYLOAD] * 2


@pytest.mark.parametrize("meanwhile", ("condemned", "sealed anew"))
def test_a_cache_that_forgets_a_key_still_drops_late_fills(
    cache: RedisReplayCache, system: FullSystem, clock: FrozenClock, meanwhile: str
) -> None:
    slow = HeldUp(cache)
    late, other, key = TieredStore(system, slow), TieredStore(system, cache), a_key()
    stand(late, clock, key, "completed")
    replayed(late, key)
    answered = SeenRecord(key, found(system, key))
    assert cache.invalidate(key, fence=answered.record.fence)
    if meanwhile == "condemned":
        other.mark_corrupt(key, OTHER_PAYLOAD)
    else:
        assert other.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)
    assert system.recovery.force_release(answered)
    slow.arrive()

    assert isinstance(other.claim(a_request(key), token=a_token(), lease=LEASE), Grant)


@pytest.mark.parametrize("change", ("marked corrupt", "sealed again"))
def test_a_late_fill_does_not_pass_a_forgotten_response_of_a_later_claim(
    cache: RedisReplayCache, system: FullSystem, clock: FrozenClock, change: str
) -> None:
    """The key was released and completed again. Forgetting the second response must not let the first one in."""
    slow = HeldUp(cache)
    late, other, key = TieredStore(system, slow), TieredStore(system, cache), a_key()
    stand(late, clock, key, "completed")
    first = replayed(late, key)
    assert other.recovery.force_release(SeenRecord(key, found(system, key)))
    stand(other, clock, key, "completed")
    assert replayed(other, key).fence > first.fence
    if change == "marked corrupt":
        other.mark_corrupt(key, PAYLOAD)
    else:
        assert other.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)
    slow.arrive()

    outcome = other.claim(a_request(key), token=a_token(), lease=LEASE)
    if change == "marked corrupt":
        assert outcome == Unknown(CORRUPT)
    else:
        assert [replayed(other, key).payload for _ in range(2)] == [OTHER_PAYLOAD] * 2
    cached_now = cache.get(key)
    assert not isinstance(cached_now, Record) or cached_now.fence > first.fence


def test_a_resolved_response_survives_a_second_corrupt_mark_of_the_old_one(
    store: TieredStore, system: FullSystem, cache: RedisReplayCache, clock: FrozenClock
) -> None:
    slow, key = HeldUp(cache), a_key()
    late = TieredStore(system, slow)
    stand(late, clock, key, "completed")
    replayed(late, key)
    store.mark_corrupt(key, PAYLOAD)
    assert store.recovery.resolve(
        SeenRecord(key, found(system, key)), token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP
    )
    store.mark_corrupt(key, PAYLOAD)
    slow.arrive()

    assert found(system, key) == replayed(store, key)


def test_a_record_that_changed_since_it_was_read_stays_and_is_replayed(
    store: TieredStore, system: FullSystem, clock: FrozenClock
) -> None:
    answered = cached(store, system, clock)
    clock.advance(KEEP)
    stand(store, clock, answered.key, "completed")

    assert not store.recovery.force_release(answered)
    assert replayed(store, answered.key) == found(system, answered.key)


class Silent(Broken):
    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        return False


@pytest.mark.parametrize("kind", (Broken, Silent))
def test_no_record_is_settled_while_the_cache_would_still_replay_it(
    kind: type[Broken], system: FullSystem, clock: FrozenClock
) -> None:
    store = TieredStore(system, kind())
    answered, damaged = a_key(), a_key()
    for key in (answered, damaged):
        stand(system, clock, key, "completed")
    system.mark_corrupt(damaged, PAYLOAD)
    before = [SeenRecord(key, found(system, key)) for key in (answered, damaged)]
    for each in before:
        with pytest.raises(StoreUnavailable, match="The record is unchanged"):
            store.recovery.force_release(each)
    with pytest.raises(StoreUnavailable, match="The record is unchanged"):
        store.recovery.resolve(before[1], token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)

    assert before == [SeenRecord(key, found(system, key)) for key in (answered, damaged)]


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
def test_a_record_without_a_response_is_released_without_the_cache(
    system: FullSystem, clock: FrozenClock, standing: Standing
) -> None:
    store, key = TieredStore(system, Broken()), a_key()
    stand(system, clock, key, standing)

    assert store.recovery.force_release(SeenRecord(key, found(system, key)))


def test_a_quarantined_record_is_resolved_without_the_cache(system: FullSystem, clock: FrozenClock) -> None:
    store, key = TieredStore(system, Broken()), a_key()
    stand(system, clock, key, "quarantined")

    assert store.recovery.resolve(SeenRecord(key, found(system, key)), token=a_token(), payload=PAYLOAD, keep=KEEP)
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)


class Unnamed(FullSystem):
    """A system that does not say which it is."""

    def identity(self) -> bytes:
        raise StoreUnavailable("down")


def test_an_unidentified_system_refuses_a_force_release(clock: FrozenClock, cache: RedisReplayCache) -> None:
    system, key = Unnamed(clock), a_key()
    stand(system, clock, key, "completed")

    with pytest.raises(StoreUnavailable, match="The record is unchanged"):
        TieredStore(system, cache).recovery.force_release(SeenRecord(key, found(system, key)))


def test_a_full_cache_refuses_a_force_release(
    store: TieredStore, system: FullSystem, clock: FrozenClock, redis_client: redis.Redis
) -> None:
    answered = cached(store, system, clock)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable, match="The record is unchanged"):
            store.recovery.force_release(answered)
    finally:
        redis_client.config_set("maxmemory", 0)

    assert store.recovery.force_release(answered)


def test_the_tiered_store_offers_what_its_system_offers_a_janitor(store: TieredStore, system: FullSystem) -> None:
    assert (system.expiry, system.task_log) == (store.expiry, store.task_log)


SEALED = replace(PAYLOAD, sealed_by=SealedBy("2026", 1))


def cached_response(store: TieredStore, system: FullSystem, key: StorageKey, payload: StoredPayload = SEALED) -> None:
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


@pytest.mark.parametrize("payload", (SEALED, PAYLOAD), ids=("sealed", "plain"))
def test_an_erased_response_is_not_replayed_from_the_cache(
    store: TieredStore, system: FullSystem, payload: StoredPayload
) -> None:
    key, other = a_key(), a_key()
    cached_response(store, system, key, payload)
    cached_response(store, system, other, payload)
    store.data_keys.shred(key.tid)

    assert [True, True] == [replayed(store, key).erased for _ in range(2)]
    assert ["claim", "claim"] == system.verbs()
    assert not replayed(store, other).erased
    assert ["claim", "claim"] == system.verbs()


def test_a_returning_tenant_is_cached_again_after_its_erasure(
    store: TieredStore, system: FullSystem, clock: FrozenClock
) -> None:
    tid = a_key().tid
    cached_response(store, system, a_key(tid=tid))
    store.data_keys.shred(tid)
    clock.advance(1)
    store.data_keys.add(tid, DataKey(2, "2026", b"wrapped"), store=store.data_keys.read_keys(tid).store, after=1)

    cached_response(store, system, a_key(tid=tid), replace(PAYLOAD, sealed_by=SealedBy("2026", 2)))


def test_an_erased_response_is_never_cached(
    system: FullSystem, cache: RedisReplayCache, monkeypatch: pytest.MonkeyPatch
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


class BrokenErase:
    """A cache with a bug."""

    def __init__(self, cache: RedisReplayCache) -> None:
        self.get, self.put, self.forget, self.invalidate = cache.get, cache.put, cache.forget, cache.invalidate

    def erase(self, tid: bytes) -> bool:
        raise KeyError("what")


class SilentErase(BrokenErase):
    def erase(self, tid: bytes) -> bool:
        return False


@pytest.mark.parametrize("kind", (BrokenErase, SilentErase))
def test_a_cache_that_fails_does_not_prevent_an_erasure(
    kind: type[BrokenErase], system: FullSystem, cache: RedisReplayCache
) -> None:
    store, key = TieredStore(system, kind(cache)), a_key()
    cached_response(store, system, key)

    with pytest.raises(StoreUnavailable, match="cache did not answer"):
        store.data_keys.shred(key.tid)
    assert () == store.data_keys.read_keys(key.tid).keys


def test_a_response_sealed_again_is_not_replayed_in_its_old_form(store: TieredStore, system: FullSystem) -> None:
    """The key that it was sealed with may be gone by then."""
    key, anew = a_key(), replace(SEALED, data=b"sealed anew")
    cached_response(store, system, key)

    assert store.responses.replace(key, SEALED, anew)
    assert anew == replayed(store, key).payload


def test_a_corrupt_response_is_not_replayed_from_the_cache(store: TieredStore, system: FullSystem) -> None:
    key = a_key()
    cached_response(store, system, key)
    store.mark_corrupt(key, SEALED)

    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)


def test_a_response_damaged_only_in_the_cache_is_replayed_by_the_system(store: TieredStore, system: FullSystem) -> None:
    """What is condemned is compared with what the system has: that is another, and stays."""
    key = a_key()
    cached_response(store, system, key)
    store.mark_corrupt(key, OTHER_PAYLOAD)

    assert SEALED == replayed(store, key).payload
    assert ["mark_corrupt", "claim"] == system.verbs()


def test_the_tiered_store_lacks_what_its_system_lacks(clock: FrozenClock, cache: RedisReplayCache) -> None:
    store = TieredStore(FaultyStore(MemoryStore(clock)), cache)

    lacking = ("recovery", "expiry", "task_log", "data_keys", "responses", "ledger")
    assert [] == [name for name in lacking if hasattr(store, name)]


def test_the_outbox_finds_the_data_keys_of_its_transaction_behind_a_cache(
    cache: RedisReplayCache, tmp_path: Path
) -> None:
    """Otherwise a message of a new tenant waits on SQLite for the transaction that publishes it, and is refused."""
    with closing(SqlStore(Database(f"sqlite:///{tmp_path / 'shop.db'}"))) as system:
        within = getattr(TieredStore(system, cache).data_keys, "within", None)
        assert within is not None
        with system.database.base.connect() as connection:
            assert isinstance(within(connection), SqlDataKeys)
