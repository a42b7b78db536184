"""A key may run again because somebody has said so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnLapse
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from flask_idempotency.testing.contract.finding import STANDINGS, UnsettledStore, begin_anew, condemned, stood
from flask_idempotency.testing.contract.racing import ROUNDS, THREADS, at_once


class Freeing:
    """`free`: as if the key had never been used, but for the fence."""

    @pytest.mark.parametrize("standing", STANDINGS)
    def test_a_key_is_freed_whatever_state_it_is_in(
        self, store: UnsettledStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """At once, for any request; and its fence rises."""
        seen, _ = stood(store, clock, standing)

        assert store.unsettled.free(seen)
        assert store.read(seen.key) is None
        another = a_request(seen.key, fingerprint=OTHER_FINGERPRINT)
        grant = granted(store.claim(another, token=a_token(), lease=LEASE))
        assert (grant.attempt, grant.fence > seen.record.fence) == (1, True)

    def test_a_condemned_key_is_freed(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Nobody could open its answer; that its work was done is for whoever frees it to know."""
        damaged, _ = condemned(store, clock)

        assert store.unsettled.free(damaged)
        assert store.read(damaged.key) is None
        granted(store.claim(a_request(damaged.key), token=a_token(), lease=LEASE))

    @pytest.mark.parametrize("standing", STANDINGS)
    def test_its_owner_has_lost_it(self, store: UnsettledStore, clock: FrozenClock, standing: Standing) -> None:
        """It can neither complete nor keep what is not its own any more; and what comes after it stays untouched."""
        seen, late = stood(store, clock, standing)
        assert store.unsettled.free(seen)
        writes: tuple[Callable[[], None], ...] = (
            lambda: store.complete(seen.key, late, PAYLOAD, keep=KEEP),
            lambda: store.renew(seen.key, late, lease=LEASE),
            lambda: store.mark(seen.key, late),
            lambda: store.hold(seen.key, late, "who knows"),
        )
        for write in writes:
            with pytest.raises(LeaseLost):
                write()
        assert store.read(seen.key) is None

        stand(store, clock, seen.key, "in flight")
        before = found(store, seen.key)
        for write in (*writes, lambda: store.release(seen.key, late)):
            with pytest.raises(LeaseLost):
                write()
        assert before == found(store, seen.key)

    def test_what_is_free_is_not_freed(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Again, after its answer's life, and when it was never there."""
        freed, _ = stood(store, clock, "quarantined")
        assert store.unsettled.free(freed)
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP)

        for each in (freed, answered, Found(a_key(), freed.record)):
            assert not store.unsettled.free(each)
            assert store.read(each.key) is None

    @pytest.mark.parametrize("event", ("renewed", "taken over", "completed", "held", "begun anew"))
    def test_what_does_not_stand_as_it_was_seen_is_not_freed(
        self, store: UnsettledStore, clock: FrozenClock, event: str
    ) -> None:
        """Whoever decided to free it did not know."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_lapse=OnLapse.TAKEOVER), token=token, lease=LEASE))
        clock.advance(LEASE)
        lapsed = Found(key, found(store, key))
        events: dict[str, Callable[[], object]] = {
            "renewed": lambda: store.renew(key, token, lease=LEASE),
            "taken over": lambda: granted(store.claim(a_request(key), token=a_token(), lease=LEASE)),
            "completed": lambda: store.complete(key, token, PAYLOAD, keep=KEEP),
            "held": lambda: store.hold(key, token, "view-crashed"),
            "begun anew": lambda: begin_anew(store, key, token),
        }
        events[event]()
        before = found(store, key)

        assert not store.unsettled.free(lapsed)
        assert before == found(store, key)

    def test_another_claim_of_the_same_moment_is_not_freed(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Its lease ends when that of the first would have: by the token alone are they told apart."""
        first, token = stood(store, clock, "in flight")
        begin_anew(store, first.key, token)
        before = found(store, first.key)
        assert first.record.deadline == before.deadline

        assert not store.unsettled.free(first)
        assert before == found(store, first.key)

    def test_an_answer_that_was_stored_anew_is_not_freed(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Its key has run again since somebody saw the first."""
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP)
        stand(store, clock, answered.key, "completed")
        before = found(store, answered.key)

        assert not store.unsettled.free(answered)
        assert before == found(store, answered.key)

    def test_a_key_is_freed_once(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """By one of many, and what is claimed after it is nobody's to free who saw the last."""
        for _ in range(ROUNDS):
            held, _ = stood(store, clock, "quarantined")

            done = at_once(*[lambda held=held: store.unsettled.free(held)] * THREADS)
            assert [each for each in done if each] == [True]

    def test_an_answer_and_who_frees_its_key_do_not_both_win(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Either the answer is there and stays, or the key is free and its owner hears so."""
        for _ in range(ROUNDS):
            flying, token = stood(store, clock, "in flight")

            def finish(key: StorageKey = flying.key, token: bytes = token) -> bool:
                try:
                    store.complete(key, token, PAYLOAD, keep=KEEP)
                except LeaseLost:
                    return False
                return True

            def free(flying: Found = flying) -> bool:
                return store.unsettled.free(flying)

            finished, freed = at_once(finish, free)
            assert (True, finished) == (finished is not freed, store.read(flying.key) is not None)
