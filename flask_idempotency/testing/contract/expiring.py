"""What is over may be removed: nothing else, by nobody, at no time."""

from __future__ import annotations

from typing import Protocol

import pytest

from flask_idempotency.engine.capabilities import Expiry
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Replayed, Unknown
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.counting import EXTRA, LedgerStore, Tenant
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from flask_idempotency.testing.contract.racing import at_once

AGES = 400 * 86400.0


class ExpiringStore(LedgerStore, Protocol):
    """A store that has to be cleared of what is over, and counts."""

    @property
    def expiry(self) -> Expiry: ...


def swept(store: ExpiringStore, *, horizon: float, limit: int = 1000) -> int:
    """How many were removed until none was left."""
    total = 0
    while removed := store.expiry.sweep(horizon=horizon, limit=limit):
        assert 0 < removed <= limit
        total += removed
    return total


class ExpiryContract:
    """The specification of `chores.Expiry`. Override `store`.

    A store may end things by itself and return 0 at once; and there may be others' things beside a test's own.
    """

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

    @pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_settled_is_never_removed(
        self, store: ExpiringStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """A year later it is as it was: nobody has said that it may run again."""
        key = a_key()
        stand(store, clock, key, standing)
        clock.advance(AGES)
        before = found(store, key)
        swept(store, horizon=clock.now + AGES)

        assert before == found(store, key)

    def test_what_nobody_could_open_is_never_removed(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """Though the life of its answer is long over."""
        key = a_key()
        stand(store, clock, key, "completed")
        store.condemn(key, PAYLOAD)
        clock.advance(AGES)
        before = found(store, key)
        swept(store, horizon=clock.now + AGES)

        assert before == found(store, key)
        assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_an_answer_is_not_removed_before_its_life_is_over(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """Whatever the horizon: it is the store's clock that ends it."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(KEEP - 0.125)
        swept(store, horizon=clock.now + AGES)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)

    def test_an_answer_is_not_removed_before_the_horizon(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """Whatever the store's clock says: it was set forward, and once it is right again the answer is there."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(2 * 86400)
        swept(store, horizon=clock.now - 2 * 86400 + KEEP - 0.125)
        clock.advance(-2 * 86400)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)

    def test_what_is_over_is_free_before_and_after(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """To sweep is to give back space: no request can tell whether anybody has."""
        removed, lying = a_key(), a_key()
        stand(store, clock, removed, "completed")
        fence = found(store, removed).fence
        clock.advance(KEEP)
        swept(store, horizon=clock.now)
        stand(store, clock, lying, "completed")
        clock.advance(KEEP)

        assert [store.read(key) for key in (removed, lying)] == [None, None]
        again = [granted(store.claim(a_request(key), token=a_token(), lease=LEASE)) for key in (removed, lying)]
        assert ([grant.attempt for grant in again], again[0].fence > fence) == ([1, 1], True)

    def test_a_released_key_keeps_its_fence_rising(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """Also when nothing is remembered of it any more."""
        key = a_key()
        token = stand(store, clock, key, "in flight")
        fence = found(store, key).fence
        store.release(key, token)
        clock.advance(AGES)
        swept(store, horizon=clock.now)

        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > fence

    def test_a_key_in_its_next_life_is_not_removed_for_its_last(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """The first life is over, and whatever entry of it is left must not end the second."""
        answered, flying = a_key(), a_key()
        for key in (answered, flying):
            stand(store, clock, key, "completed")
        clock.advance(KEEP)
        stand(store, clock, answered, "completed")
        stand(store, clock, flying, "in flight")
        swept(store, horizon=clock.now)

        assert isinstance(store.claim(a_request(answered), token=a_token(), lease=LEASE), Replayed)
        assert found(store, flying).remaining > 0

    @pytest.mark.parametrize("limit", (1, 3, 1000))
    def test_it_ends(self, store: ExpiringStore, clock: FrozenClock, limit: int) -> None:
        """When nothing is left that is over; and it removes no more at once than it may."""
        keys = self.answered(store, 7)
        clock.advance(KEEP)
        swept(store, horizon=clock.now, limit=limit)

        assert store.expiry.sweep(horizon=clock.now, limit=limit) == 0
        assert [store.read(key) for key in keys] == [None] * 7

    def test_several_remove_each_thing_once(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """As many altogether as one alone would."""
        removed = list[int]()
        # Long after all that others have left here was over, theirs that begins ages from now too: it would be counted
        # in one round, and not in the other.
        clock.advance(10 * AGES)
        for sweepers in (1, 6):
            swept(store, horizon=clock.now)
            self.answered(store, 30)
            clock.advance(KEEP)
            alone = at_once(*[lambda: swept(store, horizon=clock.now, limit=4)] * sweepers)
            # Whoever finds that others are at what is left may end before them.
            removed.append(sum(alone) + swept(store, horizon=clock.now))

        assert removed[0] == removed[1]

    def test_to_sweep_while_others_claim_harms_nobody(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """A key that is over is claimed anew at the very moment in which it is removed."""
        keys = self.answered(store, 20)
        clock.advance(KEEP)

        def claim() -> int:
            for key in keys:
                granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
            return 0

        at_once(claim, *[lambda: swept(store, horizon=clock.now, limit=3)] * 3)
        assert [found(store, key).remaining > 0 for key in keys] == [True] * 20

    def test_the_ledger_is_what_it_was(self, store: ExpiringStore, clock: FrozenClock) -> None:
        """What was over was counted nowhere, and what is not still is."""
        tenant = Tenant(store)
        tenant.complete()
        clock.advance(KEEP + EXTRA + 1)
        tenant.complete()
        tenant.claim()
        held, token = tenant.claim()
        store.hold(held, token, "view-crashed")
        usage = tenant.usage
        swept(store, horizon=clock.now)

        assert (usage, Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        clock.advance(KEEP + EXTRA + 1)
        swept(store, horizon=clock.now)
        assert (Usage(2), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def answered(self, store: ExpiringStore, number: int) -> list[StorageKey]:
        """So many keys whose answers end together."""
        keys = [a_key() for _ in range(number)]
        for key in keys:
            token = a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            store.complete(key, token, PAYLOAD, keep=KEEP)
        return keys
