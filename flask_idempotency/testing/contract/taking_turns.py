"""Quarantined records come up to be asked about: at once, and then less and less often."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    stand,
)
from flask_idempotency.testing.contract.finding import (
    UnsettledStore,
    condemned,
    noticed,
    outline,
    seen,
    stood,
)
from flask_idempotency.testing.contract.racing import at_once

LEAST, MOST = 10.0, 100.0


def due(store: UnsettledStore, *, horizon: float, limit: int = 1000) -> list[Found]:
    """All whose turn it is: there may be others' beside a test's own."""
    taken: list[Found] = []
    while given := _given(store, horizon=horizon, limit=limit):
        assert len(given) <= limit
        taken += given
    return taken


def _given(store: UnsettledStore, *, horizon: float, limit: int) -> Sequence[Found]:
    """As a janitor does: whoever is told that others were faster, time after time, asks once more."""
    for _ in range(9):
        with suppress(StoreUnavailable):
            return store.unsettled.due(horizon=horizon, least=LEAST, most=MOST, limit=limit)
    raise AssertionError("nobody was ever told")


class TakingTurns:
    """`due`: nobody is asked twice at once about one key, and nobody is forgotten."""

    @pytest.mark.parametrize("how", ("held", "lapsed in a claim", "lapsed by a janitor", "condemned"))
    def test_what_is_newly_quarantined_is_due_at_once(
        self, store: UnsettledStore, clock: FrozenClock, how: str
    ) -> None:
        """However it got there, and with all that is known of it."""
        match how:
            case "held":
                quarantined, _ = stood(store, clock, "quarantined")
            case "lapsed in a claim":
                quarantined, _ = noticed(store, clock)
            case "lapsed by a janitor":
                lapsed, _ = stood(store, clock, "lapsed, quarantine")
                assert store.unsettled.lapse(lapsed, horizon=clock.now)
                quarantined = seen(store, lapsed.key)
            case _:
                quarantined, _ = condemned(store, clock)

        assert [outline(quarantined.record)] == [
            outline(each.record) for each in due(store, horizon=clock.now) if each.key == quarantined.key
        ]

    def test_the_pauses_double_between_the_least_and_the_most(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Each is as long as the key has been quarantined for, since the end of its lease."""
        quarantined, _ = noticed(store, clock)
        pauses = list[float]()
        while pauses[-2:] != [MOST, MOST]:
            assert quarantined.key in keys(due(store, horizon=clock.now))
            pauses.append(min(max(clock.now - quarantined.record.deadline, LEAST), MOST))
            clock.advance(pauses[-1] - 0.125)
            assert quarantined.key not in keys(due(store, horizon=clock.now))
            clock.advance(0.25)

        assert pauses == pytest.approx([10, 11, 22, 44, 88, 100, 100], abs=5)

    def test_the_first_turn_is_told_from_the_others(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Who is asked for the first time may be asked too early."""
        quarantined, _ = noticed(store, clock)
        turns = list[bool]()
        for _ in range(3):
            turns += [each.asked for each in due(store, horizon=clock.now) if each.key == quarantined.key]
            clock.advance(MOST + 1)

        assert turns == [False, True, True]

    def test_an_owner_that_was_heard_of_since_is_asked_about_for_the_first_time(
        self, store: UnsettledStore, clock: FrozenClock
    ) -> None:
        """It lives, or has: what was said before is about the past."""
        key, token = a_key(), a_token()
        store.claim(a_request(key), token=token, lease=LEASE)
        clock.advance(LEASE)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert [each.asked for each in due(store, horizon=clock.now) if each.key == key] == [False]
        clock.advance(MOST)
        store.renew(key, token, lease=LEASE)
        clock.advance(86400)

        assert [each.asked for each in due(store, horizon=clock.now) if each.key == key] == [False]

    def test_only_those_are_given_that_are_meant(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Two applications may share a store, and neither can ask about the other's. Their turns are not taken."""
        several = [noticed(store, clock)[0] for _ in range(4)]
        for ours in several[1:3]:
            owner = ours.record.token[:OWNER_BYTES]
            given = store.unsettled.due(horizon=clock.now, least=LEAST, most=MOST, limit=2, owner=owner)

            assert [ours.key] == keys(given)
        left = set(keys(due(store, horizon=clock.now)))
        assert {several[0].key, several[3].key} == left & set(keys(several))

    def test_one_that_is_held_before_its_lease_is_over_waits_the_least(
        self, store: UnsettledStore, clock: FrozenClock
    ) -> None:
        """It has been quarantined for no time at all."""
        held, _ = stood(store, clock, "quarantined")
        assert held.key in keys(due(store, horizon=clock.now))
        clock.advance(LEAST - 0.125)
        assert held.key not in keys(due(store, horizon=clock.now))
        clock.advance(0.25)
        assert held.key in keys(due(store, horizon=clock.now))

    def test_a_turn_after_the_horizon_has_not_come(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """A clock that was set forward brings everybody's turn at once, and the other side a crowd."""
        held, _ = stood(store, clock, "quarantined")
        began = clock.now
        assert held.key in keys(due(store, horizon=began))
        clock.advance(86400)

        assert held.key not in keys(due(store, horizon=began + LEAST - 0.125))
        assert held.key in keys(due(store, horizon=began + LEAST + 0.125))

    def test_a_turn_is_given_once(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Whoever got it may have died: it comes again when its pause is over, and not before."""
        several = {stood(store, clock, "quarantined")[0].key for _ in range(5)}
        given = [key for key in keys(due(store, horizon=clock.now, limit=2)) if key in several]

        assert (several, 5) == (set(given), len(given))
        assert not several & set(keys(due(store, horizon=clock.now)))

    def test_of_many_who_ask_at_once_each_gets_others(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """No key is given to two, and none to nobody."""
        several = {stood(store, clock, "quarantined")[0].key for _ in range(20)}
        given = at_once(*[lambda: due(store, horizon=clock.now, limit=3)] * 8)
        ours = [key for each in given for key in keys(each) if key in several]

        assert (several, len(several)) == (set(ours), len(ours))

    @pytest.mark.parametrize("how", ("by its owner", "by another", "freed", "released"))
    def test_what_is_settled_is_not_due(self, store: UnsettledStore, clock: FrozenClock, how: str) -> None:
        """Nobody is to be asked about it any more."""
        held, token = stood(store, clock, "quarantined")
        if how == "by its owner":
            store.complete(held.key, token, PAYLOAD, keep=KEEP)
        elif how == "by another":
            assert store.unsettled.settle(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        elif how == "freed":
            assert store.unsettled.free(held)
        else:
            store.release(held.key, token)

        assert held.key not in keys(due(store, horizon=clock.now))

    def test_what_is_not_quarantined_is_not_due(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """A lapsed one is not until somebody has quarantined it."""
        others = [stood(store, clock, "lapsed, takeover"), stood(store, clock, "lapsed, quarantine")]
        others += [stood(store, clock, "in flight"), stood(store, clock, "completed")]

        assert not {each.key for each, _ in others} & set(keys(due(store, horizon=clock.now)))

    def test_a_key_that_is_quarantined_anew_is_due_at_once(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """What is asked about is another attempt; that the last one had to wait is no reason."""
        freed, answered = (stood(store, clock, "quarantined") for _ in range(2))
        due(store, horizon=clock.now)
        assert store.unsettled.free(freed[0])
        stand(store, clock, freed[0].key, "quarantined")
        store.complete(answered[0].key, answered[1], PAYLOAD, keep=KEEP)
        store.condemn(answered[0].key, PAYLOAD)
        given = keys(due(store, horizon=clock.now))

        assert [each.key in given for each, _ in (freed, answered)] == [True, True]

    def test_asking_changes_no_record(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """A turn is no lease: the owner, a person and a janitor may all settle it meanwhile."""
        held, token = stood(store, clock, "quarantined")
        due(store, horizon=clock.now)

        assert held.record == found(store, held.key)
        store.complete(held.key, token, PAYLOAD, keep=KEEP)
        assert State.COMPLETED is found(store, held.key).state


def keys(given: Sequence[Found]) -> list[StorageKey]:
    return [each.key for each in given]
