"""What the memory store promises besides the contract, which `test_contract.py` runs on it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.store import DROPPED_PER_CLAIM
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from flask_idempotency.testing.doubles import FrozenClock


@pytest.fixture
def store(clock: FrozenClock) -> MemoryStore:
    return MemoryStore(clock)


def test_expired_records_are_dropped(clock: FrozenClock, store: MemoryStore) -> None:
    for _ in range(100):
        complete_one(store)
    clock.advance(KEEP)
    for _ in range(30):
        complete_one(store)

    assert held(store) == 30


def test_one_claim_removes_only_a_few_expired_records(clock: FrozenClock, store: MemoryStore) -> None:
    for _ in range(1000):
        complete_one(store)
    clock.advance(KEEP)

    complete_one(store)

    assert held(store) == 1001 - DROPPED_PER_CLAIM


def test_a_reused_key_is_not_dropped_with_its_expired_record(clock: FrozenClock, store: MemoryStore) -> None:
    """The note to drop a key may come up when the key is long somebody else's."""
    key = complete_one(store)
    clock.advance(KEEP)
    complete_one(store, key)
    clock.advance(KEEP / 2)
    complete_one(store)

    assert store.read(key) is not None


def test_an_empty_store_is_true(store: MemoryStore) -> None:
    """`store or default` must not put another one in its place until somebody has claimed."""
    assert bool(store)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    """Whoever held the lock in that moment does not exist in the child, and could never give it back there."""
    parent, inside, forked = os.getpid(), threading.Event(), threading.Event()

    def clock() -> float:
        if os.getpid() == parent:
            inside.set()
            assert forked.wait(60)
        return 1_000_000.0

    def claims() -> bool:
        return isinstance(own.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)

    own = MemoryStore(clock)
    thread = threading.Thread(target=claims)
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:  # pragma: no cover - in another process
        ended_with = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            ended_with = 0 if claims() else 1
        finally:
            os._exit(ended_with)
    forked.set()
    thread.join()

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_without_a_clock_the_store_uses_monotonic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who sets the host's clock ahead does not end everybody's lease."""
    store = MemoryStore()
    key = a_key()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    ahead = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: ahead)

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)


def held(store: MemoryStore) -> int:
    return len(store._shared.records)


def complete_one(store: MemoryStore, key: StorageKey | None = None) -> StorageKey:
    key, token = key or a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    return key
