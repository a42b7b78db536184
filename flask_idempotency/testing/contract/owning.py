"""That a token which is no longer the record's cannot write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnLapse, Replayed, State
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
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

Write = Callable[[Store, StorageKey, bytes], None]


def _renew(store: Store, key: StorageKey, token: bytes) -> None:
    store.renew(key, token, lease=600)


def _mark(store: Store, key: StorageKey, token: bytes) -> None:
    store.mark(key, token)


def _complete(store: Store, key: StorageKey, token: bytes) -> None:
    store.complete(key, token, OTHER_PAYLOAD, keep=2 * KEEP)


def _release(store: Store, key: StorageKey, token: bytes) -> None:
    store.release(key, token)


def _hold(store: Store, key: StorageKey, token: bytes) -> None:
    store.hold(key, token, "stale")


WRITES = (_renew, _mark, _complete, _release, _hold)
every_write = pytest.mark.parametrize("write", WRITES, ids=[write.__name__[1:] for write in WRITES])


class Owning:
    """Every write after the claim carries its token, and only the record's own token writes."""

    @every_write
    @pytest.mark.parametrize("standing", ("in flight", "completed", "quarantined"))
    def test_a_stale_token_changes_nothing(
        self, store: Store, clock: FrozenClock, write: Write, standing: Standing
    ) -> None:
        """The record of whoever holds the key now is the same before and after, and the stale owner is told."""
        key = a_key()
        stale = stand(store, clock, key, "in flight")
        store.release(key, stale)
        stand(store, clock, key, standing)
        before = found(store, key)

        with pytest.raises(LeaseLost):
            write(store, key, stale)

        assert before == found(store, key)

    @every_write
    def test_a_token_that_was_taken_over_changes_nothing(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """A worker that stalls past its lease cannot touch its successor's record."""
        key = a_key()
        slow = stand(store, clock, key, "lapsed, takeover")
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        before = found(store, key)

        with pytest.raises(LeaseLost):
            write(store, key, slow)

        assert before == found(store, key)

    @every_write
    def test_a_token_that_never_owned_changes_nothing(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """Not even on a record whose lease is over: it must be claimed first."""
        key = a_key()
        stand(store, clock, key, "lapsed, takeover")
        before = found(store, key)

        with pytest.raises(LeaseLost):
            write(store, key, a_token())

        assert before == found(store, key)

    @pytest.mark.parametrize("write", (_renew, _mark, _complete, _hold), ids=("renew", "mark", "complete", "hold"))
    def test_a_released_key_takes_no_writes(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """An absent record belongs to nobody, its former owner included, and no write brings it back."""
        key = a_key()
        former = stand(store, clock, key, "in flight")
        store.release(key, former)

        with pytest.raises(LeaseLost):
            write(store, key, former)

        assert store.read(key) is None

    @every_write
    def test_an_owner_of_before_is_not_mistaken_for_the_present_one(
        self, store: Store, clock: FrozenClock, write: Write
    ) -> None:
        """
        A stalls, B takes over and releases, C claims: the key looks as it did when A left it. A's write is refused and
        C's answer is the one that stays.
        """
        key = a_key()
        first = stand(store, clock, key, "lapsed, takeover")
        second, third = a_token(), a_token()
        granted(store.claim(a_request(key, on_lapse=OnLapse.TAKEOVER), token=second, lease=LEASE))
        store.release(key, second)
        granted(store.claim(a_request(key, on_lapse=OnLapse.TAKEOVER), token=third, lease=LEASE))

        with pytest.raises(LeaseLost):
            write(store, key, first)
        store.complete(key, third, PAYLOAD, keep=KEEP)

        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert isinstance(outcome, Replayed)
        assert (third, PAYLOAD) == (outcome.answer.token, outcome.answer.payload)

    def test_the_late_finisher_is_fenced_off(self, store: Store, clock: FrozenClock) -> None:
        """The answer of the attempt that holds the key is stored, whichever is ready first."""
        key = a_key()
        slow = stand(store, clock, key, "lapsed, takeover")
        fast = a_token()
        granted(store.claim(a_request(key), token=fast, lease=LEASE))
        store.complete(key, fast, PAYLOAD, keep=KEEP)

        with pytest.raises(LeaseLost):
            store.complete(key, slow, OTHER_PAYLOAD, keep=KEEP)

        assert (found(store, key).state, found(store, key).payload) == (State.COMPLETED, PAYLOAD)
