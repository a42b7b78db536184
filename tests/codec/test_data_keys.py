"""Data keys are made once, and found by their number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flask_idempotency.codec import encryption
from flask_idempotency.codec.encryption import CACHE_SECONDS, FINISHING_SECONDS, TRIES, DataKeyCache, UnwrappedKey
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import DataKey, TenantKeys
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    KeyProviderUnavailable,
    RingMismatch,
    StoreUnavailable,
)
from flask_idempotency.engine.model import SealedBy
from tests.codec.sealing import (
    NEW,
    OLD,
    OLD_FIRST,
    OTHER_TENANT,
    RING,
    TENANT,
    Monotonic,
    Service,
    Shelf,
    keyring,
    ring_on,
)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_the_first_key_of_a_tenant_is_made(shelf: Shelf) -> None:
    ours, theirs = (ring_on(shelf).for_sealing(tid) for tid in (TENANT, OTHER_TENANT))
    stored = shelf.inner.read_keys(TENANT).keys[0]

    assert (1, "new", 32) == (ours.number, ours.kid, len(ours.key))
    assert ours.key != theirs.key
    assert (1, "new", ours.wrapped) == (stored.number, stored.kid, stored.wrapped)
    assert ours.key not in stored.wrapped


def test_another_process_has_the_same_keys(shelf: Shelf) -> None:
    made = ring_on(shelf).for_sealing(TENANT)

    assert made == ring_on(shelf).for_sealing(TENANT)
    assert made == ring_on(shelf).for_opening(TENANT, SealedBy("new", 1))


def test_processes_with_other_newest_keys_leave_each_other_alone(shelf: Shelf) -> None:
    """In the middle of a rotation each finds its own again, and no third is made: else every minute would add two."""
    keys = [ring_on(shelf, ring).for_sealing(TENANT) for ring in (OLD_FIRST, RING, OLD_FIRST, RING)]

    assert [1, 2, 1, 2] == [key.number for key in keys]
    assert keys[1] == ring_on(shelf, OLD_FIRST).for_opening(TENANT, SealedBy("new", 2))


def test_the_highest_number_seals(shelf: Shelf) -> None:
    first = ring_on(shelf).for_sealing(TENANT)
    made = ring_on(shelf)._make(TENANT, "new", shelf.inner.read_keys(TENANT))
    assert shelf.add(TENANT, DataKey(2, "new", made.wrapped), store=first.store, after=1)

    assert made == ring_on(shelf).for_sealing(TENANT)


def test_closed_keys_open_and_do_not_seal(shelf: Shelf) -> None:
    first = ring_on(shelf).for_sealing(TENANT)
    shelf.inner.disable(TENANT, 1)

    assert 2 == ring_on(shelf).for_sealing(TENANT).number
    assert first == ring_on(shelf).for_opening(TENANT, SealedBy("new", 1))


def test_of_all_that_find_none_one_makes_the_key(shelf: Shelf) -> None:
    processes = 8
    barrier = threading.Barrier(processes, timeout=60)

    def together(found: TenantKeys) -> TenantKeys:
        if not found.keys:
            barrier.wait()
        return found

    shelf.changed = together
    with ThreadPoolExecutor(processes) as pool:
        keys = list(pool.map(lambda _: ring_on(shelf).for_sealing(TENANT), range(processes)))

    assert 1 == len({key.key for key in keys})
    assert [1] == [key.number for key in shelf.inner.read_keys(TENANT).keys]
    assert 2 * processes - 1 == shelf.looks


def test_a_process_that_is_too_late_reads_the_keys_again(shelf: Shelf) -> None:
    shelf.refuses = TRIES - 1
    assert 1 == ring_on(shelf).for_sealing(TENANT).number

    shelf.refuses = TRIES
    with pytest.raises(StoreUnavailable):
        ring_on(shelf).for_sealing(OTHER_TENANT)


def test_numbers_go_on_from_the_last_that_was_given(shelf: Shelf) -> None:
    ring = ring_on(shelf)
    ring.for_sealing(TENANT)
    shelf.inner.shred(TENANT)
    ring.forget(TENANT)

    assert 2 == ring.for_sealing(TENANT).number
    with pytest.raises(CorruptRecord, match="data key 1"):
        ring.for_opening(TENANT, SealedBy("new", 1))


@pytest.mark.parametrize("error", (StoreUnavailable("away"), OSError("away"), ValueError("secret canary")))
def test_a_provider_that_fails_is_unavailable(shelf: Shelf, error: Exception) -> None:
    """Whatever it raises says nothing about the record: least of all that it is corrupt, for that would be final."""
    service = Service()
    ring_on(shelf).for_sealing(TENANT)
    service.error = error

    asking = ring_on(shelf, service)
    for ask in (
        lambda: asking.prepare(TENANT),
        lambda: asking.for_sealing(OTHER_TENANT),
        lambda: asking.for_opening(TENANT, SealedBy("new", 1)),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            ask()
        assert "canary" not in str(caught.value)


def test_a_provider_that_garbles_keys_is_found_out(shelf: Shelf) -> None:
    """Before anything is sealed with a key that could never be had again: nothing is on the shelf."""

    class Garbling(Service):
        def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
            return super().wrap(kid, key[::-1], context=context)

    with pytest.raises(StoreUnavailable, match="check the provider"):
        ring_on(shelf, Garbling()).for_sealing(TENANT)
    assert () == shelf.inner.read_keys(TENANT).keys


@pytest.mark.parametrize("answer", (b"", b"short", None, "text" * 8))
def test_a_provider_that_unwraps_no_key_is_found_out(shelf: Shelf, answer: object) -> None:
    class Careless(Service):
        def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
            return answer  # type: ignore[return-value]

    ring_on(shelf).for_sealing(TENANT)

    with pytest.raises(StoreUnavailable):
        ring_on(shelf, Careless()).for_sealing(TENANT)
    with pytest.raises((CorruptRecord, StoreUnavailable)):
        ring_on(shelf, Careless()).for_opening(TENANT, SealedBy("new", 1))


def test_a_provider_with_an_impossible_id_is_a_fault_of_the_configuration(shelf: Shelf) -> None:
    service = Service(KeyRing({"new": NEW}))
    service.__class__ = type("Long", (Service,), {"newest": "n" * 33})

    with pytest.raises(ConfigurationError, match="must match"):
        ring_on(shelf, service).for_sealing(TENANT)


def rewrapped(key: DataKey) -> DataKey:
    return replace(key, wrapped=RING.wrap("new", b"z" * 32, context=b"another"))


TAMPERED: dict[str, Callable[[TenantKeys], TenantKeys]] = {
    "other number": lambda shelf: replace(shelf, keys=tuple(replace(key, number=2) for key in shelf.keys)),
    "other id": lambda shelf: replace(shelf, keys=tuple(replace(key, kid="old") for key in shelf.keys)),
    "other store": lambda shelf: replace(shelf, store=b"another store..."),
    "other wrapped": lambda shelf: replace(shelf, keys=tuple(map(rewrapped, shelf.keys))),
    "unknown id": lambda shelf: replace(shelf, keys=tuple(replace(key, kid="none") for key in shelf.keys)),
    "cut": lambda shelf: replace(shelf, keys=tuple(replace(key, wrapped=key.wrapped[:-1]) for key in shelf.keys)),
    "gone": lambda shelf: replace(shelf, keys=()),
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_shelf_that_was_tampered_with_opens_nothing(shelf: Shelf, change: Callable[[TenantKeys], TenantKeys]) -> None:
    """A wrapped key is bound to its store, tenant, number and id, so it cannot be put in another's place."""
    ring_on(shelf).for_sealing(TENANT)
    shelf.changed = change
    record = change(shelf.inner.read_keys(TENANT)).keys or shelf.inner.read_keys(TENANT).keys

    with pytest.raises((CorruptRecord, RingMismatch)):
        ring_on(shelf).for_opening(TENANT, SealedBy(record[0].kid, record[0].number))


def test_a_key_of_another_tenant_does_not_serve(shelf: Shelf) -> None:
    ring_on(shelf).for_sealing(TENANT)
    theirs = shelf.inner.read_keys(TENANT)
    shelf.changed = lambda _: theirs

    with pytest.raises(RingMismatch):
        ring_on(shelf).for_opening(OTHER_TENANT, SealedBy("new", 1))
    with pytest.raises(StoreUnavailable, match="'new' of the ring does not open a data key that names it"):
        ring_on(shelf).for_sealing(OTHER_TENANT)


@pytest.mark.parametrize(
    ("by", "says"),
    (
        (SealedBy("old", 1), "different keys of the ring"),
        (SealedBy("new", 2), "data key 2"),
        (SealedBy("", 0), "does not name the key"),
        (SealedBy("new", 0), "does not name the key"),
        (SealedBy("new", -1), "does not name the key"),
        (SealedBy("a\nb", 1), "does not name the key"),
        (SealedBy("\ud800", 1), "does not name the key"),
    ),
)
def test_an_answer_that_names_no_key_is_corrupt(shelf: Shelf, by: SealedBy, says: str) -> None:
    ring = ring_on(shelf)
    ring.for_sealing(TENANT)

    for asked in (ring, ring_on(shelf)):
        with pytest.raises(CorruptRecord, match=says):
            asked.for_opening(TENANT, by)


def test_nothing_secret_is_shown(shelf: Shelf) -> None:
    ring = ring_on(shelf)
    key = ring.for_sealing(TENANT)

    shown = "".join(map(repr, (key, ring, ring._cache, shelf.inner.read_keys(TENANT))))
    assert not any(repr(secret)[2:-1] in shown for secret in (key.key, key.wrapped, NEW, OLD))
    assert "UnwrappedKey(kid='new', number=1)" == repr(key)
    assert keyring().for_sealing(TENANT).key != key.key


def test_a_key_is_remembered_for_a_minute(shelf: Shelf) -> None:
    """Then we call store and provider again, so that a revoked key stops working."""
    time, service = Monotonic(), Service()
    ring = ring_on(shelf, service, time)
    ring.prepare(TENANT)
    asked = shelf.looks, len(service.asked)
    time.now += CACHE_SECONDS - 0.1
    ring.prepare(TENANT)
    ring.for_opening(TENANT, SealedBy("new", 1))
    assert asked == (shelf.looks, len(service.asked))

    time.now += 0.1
    ring.for_opening(TENANT, SealedBy("new", 1))
    assert shelf.looks == asked[0] + 1
    ring.prepare(TENANT)

    assert (asked[0] + 2, 60) == (shelf.looks, CACHE_SECONDS)


def test_work_that_was_begun_can_be_finished(shelf: Shelf) -> None:
    time, service = Monotonic(), Service()
    ring = ring_on(shelf, service, time)
    ring.prepare(TENANT)
    service.error = shelf.error = StoreUnavailable("away")
    time.now += FINISHING_SECONDS - 0.1
    assert 1 == ring.for_sealing(TENANT).number
    with pytest.raises(StoreUnavailable):
        ring.prepare(TENANT)

    time.now += 0.1
    with pytest.raises(StoreUnavailable):
        ring.for_sealing(TENANT)
    assert 300 == FINISHING_SECONDS


def test_a_cached_key_seals_no_body_while_the_stored_ones_are_damaged(shelf: Shelf) -> None:
    """It is good while the store is away. A relay reads the store again, and could not open the body."""
    ring = ring_on(shelf)
    ring.prepare(TENANT)
    shelf.error = StoreUnavailable("away")
    assert 1 == ring.still_sealing(TENANT, within=None).number

    shelf.error = CorruptRecord("damaged")
    with pytest.raises(KeyProviderUnavailable, match="cannot be used: damaged"):
        ring.still_sealing(TENANT, within=None)


def test_a_new_newest_key_seals_immediately() -> None:
    """A provider elsewhere may change its mind while this process runs."""
    shelf, service = Shelf(), Service(OLD_FIRST)
    ring = ring_on(shelf, service)
    ring.for_sealing(TENANT)
    service.ring = RING

    assert (2, "new") == (ring.for_sealing(TENANT).number, ring.for_sealing(TENANT).kid)


def test_forgetting_is_of_one_tenant(shelf: Shelf) -> None:
    ring = ring_on(shelf)
    for tid in (TENANT, OTHER_TENANT):
        ring.prepare(tid)
    ring.forget(TENANT)
    shelf.error = StoreUnavailable("away")

    assert 1 == ring.for_sealing(OTHER_TENANT).number
    with pytest.raises(StoreUnavailable):
        ring.for_sealing(TENANT)
    with pytest.raises(StoreUnavailable):
        ring.for_opening(TENANT, SealedBy("new", 1))


def test_memory_is_bounded(shelf: Shelf) -> None:
    ring = ring_on(shelf, limit=6)
    for number in range(20):
        ring.prepare(b"tenant %9d" % number)
    looks = shelf.looks
    ring.prepare(b"tenant %9d" % 19)
    ring.prepare(b"tenant %9d" % 17)

    assert (6, looks) == (len(ring._cache), shelf.looks)
    ring.prepare(b"tenant %9d" % 16)
    assert shelf.looks == looks + 1
    assert 4096 == encryption.CACHE_KEYS


def test_old_keys_leave_memory_when_another_comes() -> None:
    time = Monotonic()
    memory = DataKeyCache(monotonic=time)
    key = UnwrappedKey(b"k" * 32, "new", 1, b"store", b"wrapped")
    memory.put((TENANT, 1), key, since=time.now)
    time.now += FINISHING_SECONDS
    memory.put((OTHER_TENANT, 1), key, since=time.now)

    assert 1 == len(memory)
    assert memory.get((TENANT, 1), within=FINISHING_SECONDS) is None


def test_a_key_that_was_learnt_again_shields_no_older_one() -> None:
    time = Monotonic()
    memory = DataKeyCache(monotonic=time)
    key = UnwrappedKey(b"k" * 32, "new", 1, b"store", b"wrapped")
    for number in (1, 2):
        memory.put((TENANT, number), key, since=time.now)
    time.now += FINISHING_SECONDS - 1
    memory.put((TENANT, 1), key, since=time.now)
    time.now += 1
    memory.put((TENANT, 3), key, since=time.now)

    held = [memory.get((TENANT, number), within=2 * FINISHING_SECONDS) is not None for number in (1, 2, 3)]
    assert [True, False, True] == held


def test_age_counts_from_the_question(shelf: Shelf) -> None:
    """A provider that takes half a minute to answer gives a key that is half a minute old."""
    time, service = Monotonic(), Service()
    ring = ring_on(shelf, service, time)

    def slowly(found: TenantKeys) -> TenantKeys:
        time.now += 30
        return found

    shelf.changed = slowly
    ring.prepare(TENANT)
    time.now += 30
    looks = shelf.looks
    ring.prepare(TENANT)

    assert shelf.looks == looks + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_not_locked_out(shelf: Shelf) -> None:
    """
    Though another thread of its parent held the memory's lock at that moment, which nobody in the child will give back.
    """
    ring = ring_on(shelf)
    ring.prepare(TENANT)
    with ring._cache._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover - in another process
            free = ring._cache._lock.acquire(timeout=60) and 1 == ring.for_sealing(TENANT).number
            os._exit(0 if free else 1)
        _, status = os.waitpid(child, 0)

    assert 0 == os.waitstatus_to_exitcode(status)
