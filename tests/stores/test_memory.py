"""What the memory store promises besides the contract, which `test_contract.py` runs on it."""

from __future__ import annotations

import time

import pytest

from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.stores.memory import DROPPED_PER_CLAIM, MemoryStore
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted


@pytest.fixture
def store(clock: FrozenClock) -> MemoryStore:
    return MemoryStore(clock)


def test_expired_records_are_dropped(clock: FrozenClock, store: MemoryStore) -> None:
    """
    A process that serves keys for months holds those that can still be replayed, and not all that ever were.
    """
    for _ in range(100):
        complete_one(store)
    clock.advance(KEEP)
    for _ in range(30):
        complete_one(store)

    assert len(store) == 30


def test_no_claim_pays_for_all_that_expired(clock: FrozenClock, store: MemoryStore) -> None:
    """
    A thousand answers that end in the same second are dropped a few at a time.
    """
    for _ in range(1000):
        complete_one(store)
    clock.advance(KEEP)

    complete_one(store)

    assert len(store) == 1001 - DROPPED_PER_CLAIM


def test_a_key_that_was_used_again_is_not_dropped_with_its_former_life(clock: FrozenClock, store: MemoryStore) -> None:
    """
    The note to drop a key may come up when the key is long somebody else's.
    """
    key = complete_one(store)
    clock.advance(KEEP)
    complete_one(store, key)
    clock.advance(KEEP / 2)
    complete_one(store)

    assert store.read(key) is not None


def test_without_a_clock_it_keeps_its_own_steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An operator who sets the host's clock ahead does not end everybody's lease.
    """
    store = MemoryStore()
    key = a_key()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    ahead = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: ahead)

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)


def complete_one(store: MemoryStore, key: StorageKey | None = None) -> StorageKey:
    key, token = key or a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    return key
