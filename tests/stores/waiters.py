"""Requests that wait for another process to end a claim, as the tests of notifications have them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, OnExpiry
from flask_idempotency.stores.notifications import ThreadedNotifier
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.tooling.processes import DEADLINE_SECONDS

if TYPE_CHECKING:
    # A test of one store does not import the other.
    from flask_idempotency.stores.redis.store import RedisStore
    from flask_idempotency.stores.sql.store import SqlStore


def awaited(key: StorageKey, *, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> ClaimRequest:
    return replace(a_request(key, on_expiry=on_expiry), notify_on_completion=True)


class Waiter:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)

    def wake(self) -> None:
        self._woken.release()

    def is_woken(self) -> bool:
        """Return True if it is woken before the deadline, or was since the last call."""
        return self._woken.acquire(timeout=DEADLINE_SECONDS)


@contextmanager
def waiting(notifier: ThreadedNotifier, *keys: StorageKey) -> Iterator[Waiter]:
    """Wait for these keys on a connection that listens."""
    waiter = Waiter()
    with notifier.subscribe(keys, waiter.wake):
        assert waiter.is_woken()
        yield waiter


def assert_a_forked_child_wakes_its_own(store: RedisStore | SqlStore) -> None:
    """A waiter of the child is woken in the child, and then one of the parent in the parent."""
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with waiting(store.notifier, key) as waiter:
        # A thread that wakes a waiter at this moment holds the lock, and does not exist in the child.
        with store.notifier._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(2 * round(DEADLINE_SECONDS))
                ended_with = 1
                try:
                    ended_with = 0 if _wakes(store) else 1
                finally:
                    # Whatever was raised: this copy of the test run must end here.
                    os._exit(ended_with)
        assert (child, 0) == os.waitpid(child, 0)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()


def _wakes(store: RedisStore | SqlStore) -> bool:
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with waiting(store.notifier, key) as waiter:
        store.complete(key, token, PAYLOAD, keep=KEEP)
        return waiter.is_woken()
