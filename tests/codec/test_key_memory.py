"""Data keys are remembered for a short while, and no more of them than there is room for."""

from __future__ import annotations

import os

import pytest

from flask_idempotency.codec import encryption
from flask_idempotency.codec.encryption import FINISHING_SECONDS, MEMORY_SECONDS, DataKeyCache, UnwrappedKey
from flask_idempotency.engine.capabilities import TenantKeys
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import SealedBy
from tests.codec.sealing import OTHER_TENANT, RING, TENANT, Monotonic, Service
from tests.codec.shelves import OLD_FIRST, Shelf, ring_on


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_key_is_remembered_for_a_minute(shelf: Shelf) -> None:
    """Then store and provider are asked again, so that what they refuse is felt."""
    time, service = Monotonic(), Service()
    ring = ring_on(shelf, service, time)
    ring.prepare(TENANT)
    asked = shelf.looks, len(service.asked)
    time.now += MEMORY_SECONDS - 0.1
    ring.prepare(TENANT)
    ring.for_opening(TENANT, SealedBy("new", 1))
    assert asked == (shelf.looks, len(service.asked))

    time.now += 0.1
    ring.for_opening(TENANT, SealedBy("new", 1))
    assert shelf.looks == asked[0] + 1
    ring.prepare(TENANT)

    assert (asked[0] + 2, 60) == (shelf.looks, MEMORY_SECONDS)


def test_work_that_was_begun_can_be_finished(shelf: Shelf) -> None:
    """The provider may be gone by the time a payment has been made. But not for ever."""
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


def test_a_new_newest_key_seals_at_once() -> None:
    """A provider elsewhere may change its mind while this process runs."""
    shelf, service = Shelf(), Service(OLD_FIRST)
    ring = ring_on(shelf, service)
    ring.for_sealing(TENANT)
    service.ring = RING

    assert (2, "new") == (ring.for_sealing(TENANT).number, ring.for_sealing(TENANT).kid)


def test_forgetting_is_of_one_tenant(shelf: Shelf) -> None:
    """The others' keys stay at hand."""
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
    """Any number of tenants takes so much and no more; the oldest goes first."""
    ring = ring_on(shelf, limit=6)
    for number in range(20):
        ring.prepare(b"tenant %9d" % number)
    looks = shelf.looks
    ring.prepare(b"tenant %9d" % 19)
    ring.prepare(b"tenant %9d" % 17)

    assert (6, looks) == (len(ring._memory), shelf.looks)
    ring.prepare(b"tenant %9d" % 16)
    assert shelf.looks == looks + 1
    assert 4096 == encryption.MEMORY_KEYS


def test_old_keys_leave_memory_when_another_comes() -> None:
    """Not only when it is asked for them."""
    time = Monotonic()
    memory = DataKeyCache(monotonic=time)
    key = UnwrappedKey(b"k" * 32, "new", 1, b"store", b"wrapped")
    memory.put((TENANT, 1), key, since=time.now)
    time.now += FINISHING_SECONDS
    memory.put((OTHER_TENANT, 1), key, since=time.now)

    assert 1 == len(memory)
    assert memory.get((TENANT, 1), within=FINISHING_SECONDS) is None


def test_a_key_that_was_learnt_again_shields_no_older_one() -> None:
    """It was the first to come; it is no longer the oldest."""
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
    with ring._memory._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover - in another process
            free = ring._memory._lock.acquire(timeout=60) and 1 == ring.for_sealing(TENANT).number
            os._exit(0 if free else 1)
        _, status = os.waitpid(child, 0)

    assert 0 == os.waitstatus_to_exitcode(status)
