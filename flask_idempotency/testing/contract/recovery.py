"""Contract of the janitor's work: finding expired leases, quarantining them, and the resolver queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, State, Unknown
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    LONG,
    PAYLOAD,
    Contract,
    Kit,
    Quarantined,
    Standing,
    a_token,
    for_each,
    outline,
    pages,
)


class Reaping(Contract):
    """`expired_leases` and `quarantine_expired`: the faster call wins, and a completed response stays."""

    @for_each("standing", ("lapsed, takeover", "lapsed, quarantine"))
    def test_an_expired_lease_is_listed(self, kit: Kit, standing: Standing) -> None:
        """With its key and its whole record, under each rule."""
        lapsed, _ = kit.stood(standing)

        assert lapsed.record == kit.stale(horizon=kit.now)[lapsed.key]

    def test_what_is_settled_or_in_flight_is_not_stale(self, kit: Kit) -> None:
        """Quarantined records are already known, and a response expires by itself."""
        quarantined, _ = kit.stood("quarantined")
        answered, _ = kit.stood("completed")
        kit.advance(LEASE + 1)
        flying, _ = kit.stood("in flight")
        released, token = kit.stood("in flight")
        kit.store.release(released.key, token)
        not_stale = {each.key for each in (quarantined, answered, flying, released)}

        assert not not_stale & kit.stale(horizon=kit.now + LEASE - 1).keys()

    def test_a_lease_that_ended_after_the_horizon_is_not_stale(self, kit: Kit) -> None:
        """The store's clock may have been set forward: the janitor's horizon decides which leases expired."""
        lapsed, _ = kit.stood("lapsed, quarantine")

        assert lapsed.key not in kit.stale(horizon=lapsed.record.deadline - 0.125)
        assert lapsed.key in kit.stale(horizon=lapsed.record.deadline + 0.125)

    def test_a_lease_that_has_not_ended_is_not_stale(self, kit: Kit) -> None:
        """A horizon in the future has no effect: the janitor's clock may be wrong."""
        flying, _ = kit.stood("in flight")
        kit.advance(LEASE - 0.125)
        assert flying.key not in kit.stale(horizon=kit.now + LONG)
        kit.advance(0.25)
        assert flying.key in kit.stale(horizon=kit.now + LONG)

    @for_each("limit", (1, 3, 1000))
    def test_every_stale_record_is_met(self, kit: Kit, limit: int) -> None:
        """However long the sheets are, and however many leases ended in one moment."""
        keys = {kit.begin()[0] for _ in range(7)}
        kit.advance(LEASE)

        assert keys <= kit.stale(horizon=kit.now, limit=limit).keys()

    def test_what_stays_stale_is_met_although_others_do_not(self, kit: Kit) -> None:
        """Sheets are taken while records come and go."""
        owners = {kit.key(): a_token() for _ in range(12)}
        for key, token in owners.items():
            kit.granted(key, token=token)
        kit.advance(LEASE)
        met, changed, expired = set[StorageKey](), list(owners)[::2], kit.store.recovery.expired_leases
        for sheet in pages(lambda after: expired(horizon=kit.now, after=after, limit=2)):
            met |= {each.key for each in sheet.found}
            if changed:
                kit.store.complete(key := changed.pop(), owners[key], PAYLOAD, keep=KEEP)
            kit.begin()

        assert set(list(owners)[1::2]) <= met

    def test_an_expired_claim_is_quarantined_unchanged(self, kit: Kit) -> None:
        """With its token, its fence and its lease: the owner may come back. Retries get `Unknown`."""
        lapsed, _ = kit.stood("lapsed, quarantine")

        assert kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        assert replace(lapsed.record, state=State.QUARANTINED, reason="lease-expired") == kit.found(lapsed.key)
        assert lapsed.key not in kit.stale(horizon=kit.now)
        assert Unknown("lease-expired") == kit.ask(lapsed.key)

    def test_what_is_to_be_taken_over_is_not_quarantined(self, kit: Kit) -> None:
        """The next retry takes over: only that knows the request."""
        lapsed, _ = kit.stood("lapsed, takeover")

        assert not kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        assert lapsed.record == kit.found(lapsed.key)
        assert kit.granted(lapsed.key).attempt == 2

    def test_a_lease_that_expired_after_the_horizon_is_not_quarantined(self, kit: Kit) -> None:
        """Another janitor with another horizon had seen it."""
        lapsed, _ = kit.stood("lapsed, quarantine")

        assert not kit.store.recovery.quarantine_expired(lapsed, horizon=lapsed.record.deadline - 0.125)
        assert lapsed.record == kit.found(lapsed.key)

    def test_a_running_lease_is_not_quarantined(self, kit: Kit) -> None:
        """With every horizon, also if the janitor saw it expire before the clock was set back."""
        flying, _ = kit.stood("in flight")
        lapsed, _ = kit.stood("lapsed, quarantine")
        kit.advance(-LEASE)

        for each in (flying, lapsed):
            assert not kit.store.recovery.quarantine_expired(each, horizon=kit.now + LONG)
            assert State.PROCESSING is kit.found(each.key).state

    @for_each("event", ("renewed", "taken over", "completed", "held", "lapsed", "freed", "begun again"))
    def test_a_record_that_has_changed_is_not_quarantined(self, kit: Kit, event: str) -> None:
        """Also if the lease of the newer claim has expired, too."""
        taken_over = event == "taken over"
        lapsed, token = kit.stood("lapsed, takeover" if taken_over else "lapsed, quarantine")
        changes = kit.changes(lapsed.key, token) | {
            "lapsed": lambda: kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now),
            "freed": lambda: kit.store.release(lapsed.key, token),
        }
        changes[event]()
        kit.advance(2 * LEASE)
        before = kit.store.read(lapsed.key)

        assert not kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        assert before == kit.store.read(lapsed.key)

    def test_a_record_in_another_state_is_not_quarantined(self, kit: Kit) -> None:
        """However it was seen: completed, condemned, held."""
        answered, _ = kit.placed("completed")
        damaged, _ = kit.placed("condemned")
        held, _ = kit.placed("quarantined")
        kit.advance(2 * LEASE)
        for key in (answered, damaged, held):
            with kit.unchanged(key):
                assert not kit.store.recovery.quarantine_expired(kit.seen(key), horizon=kit.now)

    def test_a_late_owner_may_still_complete(self, kit: Kit) -> None:
        """The worker was slow, not dead. Its response ends the quarantine."""
        lapsed, token = kit.stood("lapsed, quarantine")
        assert kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        kit.store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)

        assert (kit.found(lapsed.key).state, kit.found(lapsed.key).reason) == (State.COMPLETED, "")
        assert isinstance(kit.ask(lapsed.key), Record)
        assert not kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        assert kit.found(lapsed.key).payload == PAYLOAD

    def test_a_late_owner_may_still_release(self, kit: Kit) -> None:
        """Only its worker knows the outcome."""
        key, token = kit.placed("reaped")
        kit.store.release(key, token)

        assert kit.store.read(key) is None

    def test_of_many_janitors_one_quarantines(self, kit: Kit) -> None:
        """So that one event reports it."""
        for _ in range(ROUNDS):
            lapsed, _ = kit.stood("lapsed, quarantine")

            reap = partial(kit.store.recovery.quarantine_expired, lapsed, horizon=kit.now)

            assert at_once(*[reap] * THREADS).count(True) == 1

    def test_a_janitor_and_a_late_owner_do_not_harm_each_other(self, kit: Kit) -> None:
        """In every order, the store has the response at the end."""
        for _ in range(ROUNDS):
            lapsed, token = kit.stood("lapsed, quarantine")
            reap = partial(kit.store.recovery.quarantine_expired, lapsed, horizon=kit.now)

            assert at_once(partial(kit.completes, lapsed.key, token), reap)[0]
            assert (kit.found(lapsed.key).state, kit.found(lapsed.key).payload) == (State.COMPLETED, PAYLOAD)

    def test_a_janitor_and_a_retry_do_not_both_decide(self, kit: Kit) -> None:
        """What is taken over is in flight; what is quarantined is not taken over."""
        for on_expiry in OnExpiry:
            standing: Standing = "lapsed, takeover" if on_expiry is OnExpiry.TAKEOVER else "lapsed, quarantine"
            lapsed, token = kit.stood(standing)
            retry: Callable[[], object] = partial(kit.ask, lapsed.key)

            at_once(retry, partial(kit.store.recovery.quarantine_expired, lapsed, horizon=kit.now))
            record = kit.found(lapsed.key)
            if on_expiry is OnExpiry.TAKEOVER:
                assert (record.state, record.attempt) == (State.PROCESSING, 2)
                assert not kit.completes(lapsed.key, token)
            else:
                assert (record.state, record.attempt) == (State.QUARANTINED, 1)


# Quarantined records are due for a resolver: immediately, and then less and less often.

LEAST, MOST = 10.0, 100.0


def due(kit: Kit, *, horizon: float | None = None, limit: int = 1000) -> list[SeenRecord]:
    """All whose turn it is, now or at this horizon: there may be others' beside a test's own."""
    taken: list[SeenRecord] = []
    while given := _given(kit, horizon=kit.now if horizon is None else horizon, limit=limit):
        assert len(given) <= limit
        taken += given
    return taken


def _given(kit: Kit, *, horizon: float, limit: int) -> Sequence[SeenRecord]:
    """Repeat a call that failed because of other writers, as a janitor does."""
    for _ in range(9):
        with suppress(StoreUnavailable):
            return kit.store.recovery.next_for_resolver(horizon=horizon, least=LEAST, most=MOST, limit=limit)
    raise AssertionError("the store stayed unavailable for nine calls")


class ResolverQueue(Contract):
    """`next_for_resolver` returns each due key to one janitor at a time, and skips none."""

    @for_each("how", get_args(Quarantined))
    def test_a_newly_quarantined_key_is_due_immediately(self, kit: Kit, how: Quarantined) -> None:
        """However it got there, and with all that is known of it."""
        quarantined, _ = kit.stood(how)

        assert [outline(quarantined.record)] == [
            outline(each.record) for each in due(kit) if each.key == quarantined.key
        ]

    def test_the_pauses_double_between_the_least_and_the_most(self, kit: Kit) -> None:
        """Each is as long as the key has been quarantined for, since the end of its lease."""
        quarantined, _ = kit.stood("noticed")
        pauses = list[float]()
        while pauses[-2:] != [MOST, MOST]:
            assert quarantined.key in keys(due(kit))
            pauses.append(min(max(kit.now - quarantined.record.deadline, LEAST), MOST))
            kit.advance(pauses[-1] - 0.125)
            assert quarantined.key not in keys(due(kit))
            kit.advance(0.25)

        assert pauses == pytest.approx([10, 11, 22, 44, 88, 100, 100], abs=5)

    def test_the_first_turn_is_marked_as_the_first(self, kit: Kit) -> None:
        """The first turn may come too early."""
        quarantined, _ = kit.stood("noticed")
        turns = list[bool]()
        for _ in range(3):
            turns += [each.returned_before for each in due(kit) if each.key == quarantined.key]
            kit.advance(MOST + 1)

        assert turns == [False, True, True]

    def test_a_renewed_claim_gets_its_first_turn_again(self, kit: Kit) -> None:
        """Its worker has run since, so the earlier turn no longer counts."""
        key, token = kit.placed("noticed")
        assert [each.returned_before for each in due(kit) if each.key == key] == [False]
        kit.advance(MOST)
        kit.store.renew(key, token, lease=LEASE)
        kit.advance(86400)

        assert [each.returned_before for each in due(kit) if each.key == key] == [False]

    def test_only_those_are_given_that_are_meant(self, kit: Kit) -> None:
        """Two applications may share a store. Neither gets the other's keys or uses up their turns."""
        several = [kit.stood("noticed")[0] for _ in range(4)]
        for ours in several[1:3]:
            owner = ours.record.token[:OWNER_BYTES]
            given = kit.store.recovery.next_for_resolver(horizon=kit.now, least=LEAST, most=MOST, limit=2, owner=owner)

            assert [ours.key] == keys(given)
        left = set(keys(due(kit)))
        assert {several[0].key, several[3].key} == left & set(keys(several))

    def test_one_that_is_held_before_its_lease_is_over_waits_the_least(self, kit: Kit) -> None:
        """It has been quarantined for no time at all."""
        held, _ = kit.stood("quarantined")
        assert held.key in keys(due(kit))
        kit.advance(LEAST - 0.125)
        assert held.key not in keys(due(kit))
        kit.advance(0.25)
        assert held.key in keys(due(kit))

    def test_a_turn_after_the_horizon_has_not_come(self, kit: Kit) -> None:
        """If the clock was set forward, all turns come at the same time."""
        held, _ = kit.stood("quarantined")
        began = kit.now
        assert held.key in keys(due(kit, horizon=began))
        kit.advance(86400)

        assert held.key not in keys(due(kit, horizon=began + LEAST - 0.125))
        assert held.key in keys(due(kit, horizon=began + LEAST + 0.125))

    def test_a_turn_is_given_once(self, kit: Kit) -> None:
        """The janitor that got it may have died: the key comes again after its pause, and not before."""
        several = {kit.stood("quarantined")[0].key for _ in range(5)}
        given = [key for key in keys(due(kit, limit=2)) if key in several]

        assert (several, 5) == (set(given), len(given))
        assert not several & set(keys(due(kit)))

    def test_parallel_janitors_get_different_keys(self, kit: Kit) -> None:
        """Exactly one janitor gets each key."""
        several = {kit.stood("quarantined")[0].key for _ in range(20)}
        given = at_once(*[lambda: due(kit, limit=3)] * 8)
        ours = [key for each in given for key in keys(each) if key in several]

        assert (several, len(several)) == (set(ours), len(ours))

    @for_each("how", ("by its owner", "by another", "freed", "released"))
    def test_what_is_settled_is_not_due(self, kit: Kit, how: str) -> None:
        """A resolved key has no more turns."""
        held, token = kit.stood("quarantined")
        if how == "by its owner":
            kit.store.complete(held.key, token, PAYLOAD, keep=KEEP)
        elif how == "by another":
            assert kit.resolve(held)
        elif how == "freed":
            assert kit.store.recovery.force_release(held)
        else:
            kit.store.release(held.key, token)

        assert held.key not in keys(due(kit))

    def test_what_is_not_quarantined_is_not_due(self, kit: Kit) -> None:
        """A record with an expired lease has no turn until a janitor has quarantined it."""
        others = [kit.stood("lapsed, takeover"), kit.stood("lapsed, quarantine")]
        others += [kit.stood("in flight"), kit.stood("completed")]

        assert not {each.key for each, _ in others} & set(keys(due(kit)))

    def test_a_key_that_is_quarantined_again_is_due_immediately(self, kit: Kit) -> None:
        """This is a new attempt, so the pause of the last one does not count."""
        freed, answered = (kit.stood("quarantined") for _ in range(2))
        due(kit)
        assert kit.store.recovery.force_release(freed[0])
        kit.stand(freed[0].key, "quarantined")
        kit.store.complete(answered[0].key, answered[1], PAYLOAD, keep=KEEP)
        kit.store.mark_corrupt(answered[0].key, PAYLOAD)
        given = keys(due(kit))

        assert [each.key in given for each, _ in (freed, answered)] == [True, True]

    def test_asking_changes_no_record(self, kit: Kit) -> None:
        """A turn is no lease: the owner, an operator and a janitor may resolve the key at the same time."""
        held, token = kit.stood("quarantined")
        due(kit)

        assert held.record == kit.found(held.key)
        kit.store.complete(held.key, token, PAYLOAD, keep=KEEP)
        assert State.COMPLETED is kit.found(held.key).state


def keys(given: Sequence[SeenRecord]) -> list[StorageKey]:
    return [each.key for each in given]
