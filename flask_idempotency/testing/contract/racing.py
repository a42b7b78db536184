"""Many at once."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, InFlight, OnLapse, Replayed
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)

THREADS = 16
ROUNDS = 10
MEETING_SECONDS = 30.0

ReturnT = TypeVar("ReturnT")


def at_once(*calls: Callable[[], ReturnT]) -> list[ReturnT]:
    """What these return when all of them start together, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def started_together(call: Callable[[], ReturnT]) -> ReturnT:
        barrier.wait(MEETING_SECONDS)
        return call()

    usual, collected = sys.getswitchinterval(), gc.isenabled()
    # Python 3.11 crashes when one thread collects garbage while it makes an object's `__dict__`, and another thread asks
    # for the same one meanwhile: both get theirs, over one array. SQLAlchemy's statements are full of such moments.
    gc.disable()
    # Python lets a thread run for 5 ms, in which a store in memory answers a hundred times: no race would ever show.
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(started_together, calls))
    finally:
        sys.setswitchinterval(usual)
        if collected:
            gc.enable()


class Racing:
    """`claim` is one atomic step."""

    def test_of_many_exactly_one_is_granted(self, store: Store) -> None:
        """All the others hear that it is in flight."""
        for _ in range(ROUNDS):
            ask = a_request(a_key())

            outcomes = at_once(*[lambda ask=ask: store.claim(ask, token=a_token(), lease=LEASE)] * THREADS)

            assert [True for outcome in outcomes if isinstance(outcome, Claimed)] == [True]
            assert sum(isinstance(outcome, InFlight) for outcome in outcomes) == THREADS - 1

    def test_of_many_exactly_one_takes_over(self, store: Store, clock: FrozenClock) -> None:
        """A lapsed claim has one successor, however many saw it lapse."""
        for _ in range(ROUNDS):
            key = a_key()
            stand(store, clock, key, "lapsed, takeover")
            ask = a_request(key, on_lapse=OnLapse.TAKEOVER)

            outcomes = at_once(*[lambda ask=ask: store.claim(ask, token=a_token(), lease=LEASE)] * THREADS)

            assert [outcome.held.attempt for outcome in outcomes if isinstance(outcome, Claimed)] == [2]
            assert sum(isinstance(outcome, InFlight) for outcome in outcomes) == THREADS - 1

    def test_replays_do_not_stand_in_each_others_way(self, store: Store, clock: FrozenClock) -> None:
        """Any number may read an answer at once."""
        key = a_key()
        stand(store, clock, key, "completed")

        outcomes = at_once(*[lambda: store.claim(a_request(key), token=a_token(), lease=LEASE)] * THREADS)

        assert [Replayed(found(store, key))] * THREADS == outcomes

    def test_a_late_owner_and_its_successor_do_not_both_win(self, store: Store, clock: FrozenClock) -> None:
        """Either the answer came first and is replayed, or the take-over did and the answer is refused."""
        for _ in range(ROUNDS * 5):
            key = a_key()
            slow = stand(store, clock, key, "lapsed, takeover")

            def finish(key: StorageKey = key, slow: bytes = slow) -> bool:
                try:
                    store.complete(key, slow, PAYLOAD, keep=KEEP)
                except LeaseLost:
                    return False
                return True

            def take_over(key: StorageKey = key) -> bool:
                return isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Claimed)

            assert sorted(at_once(finish, take_over)) == [False, True]

    def test_fences_rise_through_a_crowd(self, store: Store) -> None:
        """Claim and release as fast as many threads can: no fence of the key comes twice, or goes back."""
        key = a_key()

        def claim_and_release() -> list[int]:
            fences = []
            for _ in range(20):
                token = a_token()
                outcome = store.claim(a_request(key), token=token, lease=LEASE)
                if isinstance(outcome, Claimed):
                    fences.append(outcome.held.fence)
                    store.release(key, token)
            return fences

        taken = at_once(*[claim_and_release] * THREADS)

        assert all(fences == sorted(fences) for fences in taken)
        every = [fence for fences in taken for fence in fences]
        assert len(every) == len(set(every)) > 0
        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > max(every)
