"""Contract of the janitor's work: finding expired leases, quarantining them, and the resolver queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, State, Unknown
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    CapableStore,
    Standing,
    a_key,
    a_request,
    a_token,
    begin_anew,
    condemned,
    for_each,
    found,
    granted,
    noticed,
    outline,
    seen,
    stale,
    stand,
    stood,
)
from flask_idempotency.testing.doubles import FrozenClock

AGES = 400 * 86400.0


class Reaping:
    """`expired_leases` and `quarantine_expired`: the faster call wins, and a completed response stays."""

    @for_each("standing", ("lapsed, takeover", "lapsed, quarantine"))
    def test_an_expired_lease_is_listed(self, store: CapableStore, clock: FrozenClock, standing: Standing) -> None:
        """With its key and its whole record, under each rule."""
        lapsed, _ = stood(store, clock, standing)

        assert lapsed.record == stale(store, horizon=clock.now)[lapsed.key]

    def test_what_is_settled_or_in_flight_is_not_stale(self, store: CapableStore, clock: FrozenClock) -> None:
        """Quarantined records are already known, and a response expires by itself."""
        quarantined, _ = stood(store, clock, "quarantined")
        answered, _ = stood(store, clock, "completed")
        clock.advance(LEASE + 1)
        flying, _ = stood(store, clock, "in flight")
        released, token = stood(store, clock, "in flight")
        store.release(released.key, token)
        not_stale = {each.key for each in (quarantined, answered, flying, released)}

        assert not not_stale & stale(store, horizon=clock.now + LEASE - 1).keys()

    def test_a_lease_that_ended_after_the_horizon_is_not_stale(self, store: CapableStore, clock: FrozenClock) -> None:
        """The store's clock may have been set forward: the janitor's horizon decides which leases expired."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert lapsed.key not in stale(store, horizon=lapsed.record.deadline - 0.125)
        assert lapsed.key in stale(store, horizon=lapsed.record.deadline + 0.125)

    def test_a_lease_that_has_not_ended_is_not_stale(self, store: CapableStore, clock: FrozenClock) -> None:
        """A horizon in the future has no effect: the janitor's clock may be wrong."""
        flying, _ = stood(store, clock, "in flight")
        clock.advance(LEASE - 0.125)
        assert flying.key not in stale(store, horizon=clock.now + AGES)
        clock.advance(0.25)
        assert flying.key in stale(store, horizon=clock.now + AGES)

    @for_each("limit", (1, 3, 1000))
    def test_every_stale_record_is_met(self, store: CapableStore, clock: FrozenClock, limit: int) -> None:
        """However long the sheets are, and however many leases ended in one moment."""
        keys = [a_key() for _ in range(7)]
        for key in keys:
            granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        clock.advance(LEASE)

        assert set(keys) <= stale(store, horizon=clock.now, limit=limit).keys()

    def test_what_stays_stale_is_met_although_others_do_not(self, store: CapableStore, clock: FrozenClock) -> None:
        """Sheets are taken while records come and go."""
        owners = {a_key(): a_token() for _ in range(12)}
        for key, token in owners.items():
            granted(store.claim(a_request(key), token=token, lease=LEASE))
        clock.advance(LEASE)
        met, changed, after = set[StorageKey](), list(owners)[::2], b""
        while True:
            sheet = store.recovery.expired_leases(horizon=clock.now, after=after, limit=2)
            met |= {each.key for each in sheet.found}
            if changed:
                store.complete(key := changed.pop(), owners[key], PAYLOAD, keep=KEEP)
            stand(store, clock, a_key(), "in flight")
            if sheet.after is None:
                break
            after = sheet.after

        assert set(list(owners)[1::2]) <= met

    def test_an_expired_claim_is_quarantined_unchanged(self, store: CapableStore, clock: FrozenClock) -> None:
        """With its token, its fence and its lease: the owner may come back. Retries get `Unknown`."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert replace(lapsed.record, state=State.QUARANTINED, reason="lease-expired") == found(store, lapsed.key)
        assert lapsed.key not in stale(store, horizon=clock.now)
        assert Unknown("lease-expired") == store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)

    def test_what_is_to_be_taken_over_is_not_quarantined(self, store: CapableStore, clock: FrozenClock) -> None:
        """The next retry takes over: only that knows the request."""
        lapsed, _ = stood(store, clock, "lapsed, takeover")

        assert not store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert lapsed.record == found(store, lapsed.key)
        assert granted(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)).attempt == 2

    def test_a_lease_that_expired_after_the_horizon_is_not_quarantined(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Another janitor with another horizon had seen it."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert not store.recovery.quarantine_expired(lapsed, horizon=lapsed.record.deadline - 0.125)
        assert lapsed.record == found(store, lapsed.key)

    def test_a_running_lease_is_not_quarantined(self, store: CapableStore, clock: FrozenClock) -> None:
        """With every horizon, also if the janitor saw it expire before the clock was set back."""
        flying, _ = stood(store, clock, "in flight")
        lapsed, _ = stood(store, clock, "lapsed, quarantine")
        clock.advance(-LEASE)

        for each in (flying, lapsed):
            assert not store.recovery.quarantine_expired(each, horizon=clock.now + AGES)
            assert State.PROCESSING is found(store, each.key).state

    @for_each("event", ("renewed", "taken over", "completed", "held", "lapsed", "freed", "begun again"))
    def test_a_record_that_has_changed_is_not_quarantined(
        self, store: CapableStore, clock: FrozenClock, event: str
    ) -> None:
        """Also if the lease of the newer claim has expired, too."""
        taken_over = event == "taken over"
        lapsed, token = stood(store, clock, "lapsed, takeover" if taken_over else "lapsed, quarantine")
        events: dict[str, Callable[[], object]] = {
            "renewed": lambda: store.renew(lapsed.key, token, lease=LEASE),
            "taken over": lambda: granted(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)),
            "completed": lambda: store.complete(lapsed.key, token, PAYLOAD, keep=KEEP),
            "held": lambda: store.quarantine(lapsed.key, token, "view-crashed"),
            "lapsed": lambda: store.recovery.quarantine_expired(lapsed, horizon=clock.now),
            "freed": lambda: store.release(lapsed.key, token),
            "begun again": lambda: begin_anew(store, lapsed.key, token),
        }
        events[event]()
        clock.advance(2 * LEASE)
        before = store.read(lapsed.key)

        assert not store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert before == store.read(lapsed.key)

    def test_a_record_in_another_state_is_not_quarantined(self, store: CapableStore, clock: FrozenClock) -> None:
        """However it was seen: completed, condemned, held."""
        answered, _ = stood(store, clock, "completed")
        damaged, _ = condemned(store, clock)
        held, _ = stood(store, clock, "quarantined")
        clock.advance(2 * LEASE)
        for each in (answered, damaged, held):
            before = found(store, each.key)

            assert not store.recovery.quarantine_expired(SeenRecord(each.key, before), horizon=clock.now)
            assert before == found(store, each.key)

    def test_a_late_owner_may_still_complete(self, store: CapableStore, clock: FrozenClock) -> None:
        """The worker was slow, not dead. Its response ends the quarantine."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)

        assert (found(store, lapsed.key).state, found(store, lapsed.key).reason) == (State.COMPLETED, "")
        assert isinstance(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE), Record)
        assert not store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert found(store, lapsed.key).payload == PAYLOAD

    def test_a_late_owner_may_still_release(self, store: CapableStore, clock: FrozenClock) -> None:
        """Only its worker knows the outcome."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        store.release(lapsed.key, token)

        assert store.read(lapsed.key) is None

    def test_of_many_janitors_one_quarantines(self, store: CapableStore, clock: FrozenClock) -> None:
        """So that one event reports it."""
        for _ in range(ROUNDS):
            lapsed, _ = stood(store, clock, "lapsed, quarantine")

            done = at_once(
                *[lambda lapsed=lapsed: store.recovery.quarantine_expired(lapsed, horizon=clock.now)] * THREADS
            )
            assert [each for each in done if each] == [True]

    def test_a_janitor_and_a_late_owner_do_not_harm_each_other(self, store: CapableStore, clock: FrozenClock) -> None:
        """In every order, the store has the response at the end."""
        for _ in range(ROUNDS):
            lapsed, token = stood(store, clock, "lapsed, quarantine")

            def finish(lapsed: SeenRecord = lapsed, token: bytes = token) -> bool:
                store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)
                return True

            def reap(lapsed: SeenRecord = lapsed) -> bool:
                store.recovery.quarantine_expired(lapsed, horizon=clock.now)
                return True

            assert at_once(finish, reap) == [True, True]
            assert (found(store, lapsed.key).state, found(store, lapsed.key).payload) == (State.COMPLETED, PAYLOAD)

    def test_a_janitor_and_a_retry_do_not_both_decide(self, store: CapableStore, clock: FrozenClock) -> None:
        """What is taken over is in flight; what is quarantined is not taken over."""
        for on_expiry in OnExpiry:
            standing: Standing = "lapsed, takeover" if on_expiry is OnExpiry.TAKEOVER else "lapsed, quarantine"
            lapsed, token = stood(store, clock, standing)

            def retry(lapsed: SeenRecord = lapsed) -> object:
                return store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)

            def reap(lapsed: SeenRecord = lapsed) -> object:
                return store.recovery.quarantine_expired(lapsed, horizon=clock.now)

            at_once(retry, reap)
            record = found(store, lapsed.key)
            if on_expiry is OnExpiry.TAKEOVER:
                assert (record.state, record.attempt) == (State.PROCESSING, 2)
                with pytest.raises(LeaseLost):
                    store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)
            else:
                assert (record.state, record.attempt) == (State.QUARANTINED, 1)


# Quarantined records are due for a resolver: immediately, and then less and less often.

LEAST, MOST = 10.0, 100.0


def due(store: CapableStore, *, horizon: float, limit: int = 1000) -> list[SeenRecord]:
    """All whose turn it is: there may be others' beside a test's own."""
    taken: list[SeenRecord] = []
    while given := _given(store, horizon=horizon, limit=limit):
        assert len(given) <= limit
        taken += given
    return taken


def _given(store: CapableStore, *, horizon: float, limit: int) -> Sequence[SeenRecord]:
    """Repeat a call that failed because of other writers, as a janitor does."""
    for _ in range(9):
        with suppress(StoreUnavailable):
            return store.recovery.next_for_resolver(horizon=horizon, least=LEAST, most=MOST, limit=limit)
    raise AssertionError("the store stayed unavailable for nine calls")


class ResolverQueue:
    """`next_for_resolver` returns each due key to one janitor at a time, and skips none."""

    @for_each("how", ("held", "lapsed in a claim", "lapsed by a janitor", "condemned"))
    def test_a_newly_quarantined_key_is_due_immediately(
        self, store: CapableStore, clock: FrozenClock, how: str
    ) -> None:
        """However it got there, and with all that is known of it."""
        match how:
            case "held":
                quarantined, _ = stood(store, clock, "quarantined")
            case "lapsed in a claim":
                quarantined, _ = noticed(store, clock)
            case "lapsed by a janitor":
                lapsed, _ = stood(store, clock, "lapsed, quarantine")
                assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
                quarantined = seen(store, lapsed.key)
            case _:
                quarantined, _ = condemned(store, clock)

        assert [outline(quarantined.record)] == [
            outline(each.record) for each in due(store, horizon=clock.now) if each.key == quarantined.key
        ]

    def test_the_pauses_double_between_the_least_and_the_most(self, store: CapableStore, clock: FrozenClock) -> None:
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

    def test_the_first_turn_is_marked_as_the_first(self, store: CapableStore, clock: FrozenClock) -> None:
        """The first turn may come too early."""
        quarantined, _ = noticed(store, clock)
        turns = list[bool]()
        for _ in range(3):
            turns += [each.returned_before for each in due(store, horizon=clock.now) if each.key == quarantined.key]
            clock.advance(MOST + 1)

        assert turns == [False, True, True]

    def test_a_renewed_claim_gets_its_first_turn_again(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its worker has run since, so the earlier turn no longer counts."""
        key, token = a_key(), a_token()
        store.claim(a_request(key), token=token, lease=LEASE)
        clock.advance(LEASE)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert [each.returned_before for each in due(store, horizon=clock.now) if each.key == key] == [False]
        clock.advance(MOST)
        store.renew(key, token, lease=LEASE)
        clock.advance(86400)

        assert [each.returned_before for each in due(store, horizon=clock.now) if each.key == key] == [False]

    def test_only_those_are_given_that_are_meant(self, store: CapableStore, clock: FrozenClock) -> None:
        """Two applications may share a store. Neither gets the other's keys or uses up their turns."""
        several = [noticed(store, clock)[0] for _ in range(4)]
        for ours in several[1:3]:
            owner = ours.record.token[:OWNER_BYTES]
            given = store.recovery.next_for_resolver(horizon=clock.now, least=LEAST, most=MOST, limit=2, owner=owner)

            assert [ours.key] == keys(given)
        left = set(keys(due(store, horizon=clock.now)))
        assert {several[0].key, several[3].key} == left & set(keys(several))

    def test_one_that_is_held_before_its_lease_is_over_waits_the_least(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """It has been quarantined for no time at all."""
        held, _ = stood(store, clock, "quarantined")
        assert held.key in keys(due(store, horizon=clock.now))
        clock.advance(LEAST - 0.125)
        assert held.key not in keys(due(store, horizon=clock.now))
        clock.advance(0.25)
        assert held.key in keys(due(store, horizon=clock.now))

    def test_a_turn_after_the_horizon_has_not_come(self, store: CapableStore, clock: FrozenClock) -> None:
        """If the clock was set forward, all turns come at the same time."""
        held, _ = stood(store, clock, "quarantined")
        began = clock.now
        assert held.key in keys(due(store, horizon=began))
        clock.advance(86400)

        assert held.key not in keys(due(store, horizon=began + LEAST - 0.125))
        assert held.key in keys(due(store, horizon=began + LEAST + 0.125))

    def test_a_turn_is_given_once(self, store: CapableStore, clock: FrozenClock) -> None:
        """The janitor that got it may have died: the key comes again after its pause, and not before."""
        several = {stood(store, clock, "quarantined")[0].key for _ in range(5)}
        given = [key for key in keys(due(store, horizon=clock.now, limit=2)) if key in several]

        assert (several, 5) == (set(given), len(given))
        assert not several & set(keys(due(store, horizon=clock.now)))

    def test_parallel_janitors_get_different_keys(self, store: CapableStore, clock: FrozenClock) -> None:
        """Exactly one janitor gets each key."""
        several = {stood(store, clock, "quarantined")[0].key for _ in range(20)}
        given = at_once(*[lambda: due(store, horizon=clock.now, limit=3)] * 8)
        ours = [key for each in given for key in keys(each) if key in several]

        assert (several, len(several)) == (set(ours), len(ours))

    @for_each("how", ("by its owner", "by another", "freed", "released"))
    def test_what_is_settled_is_not_due(self, store: CapableStore, clock: FrozenClock, how: str) -> None:
        """A resolved key has no more turns."""
        held, token = stood(store, clock, "quarantined")
        if how == "by its owner":
            store.complete(held.key, token, PAYLOAD, keep=KEEP)
        elif how == "by another":
            assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        elif how == "freed":
            assert store.recovery.force_release(held)
        else:
            store.release(held.key, token)

        assert held.key not in keys(due(store, horizon=clock.now))

    def test_what_is_not_quarantined_is_not_due(self, store: CapableStore, clock: FrozenClock) -> None:
        """A record with an expired lease has no turn until a janitor has quarantined it."""
        others = [stood(store, clock, "lapsed, takeover"), stood(store, clock, "lapsed, quarantine")]
        others += [stood(store, clock, "in flight"), stood(store, clock, "completed")]

        assert not {each.key for each, _ in others} & set(keys(due(store, horizon=clock.now)))

    def test_a_key_that_is_quarantined_again_is_due_immediately(self, store: CapableStore, clock: FrozenClock) -> None:
        """This is a new attempt, so the pause of the last one does not count."""
        freed, answered = (stood(store, clock, "quarantined") for _ in range(2))
        due(store, horizon=clock.now)
        assert store.recovery.force_release(freed[0])
        stand(store, clock, freed[0].key, "quarantined")
        store.complete(answered[0].key, answered[1], PAYLOAD, keep=KEEP)
        store.mark_corrupt(answered[0].key, PAYLOAD)
        given = keys(due(store, horizon=clock.now))

        assert [each.key in given for each, _ in (freed, answered)] == [True, True]

    def test_asking_changes_no_record(self, store: CapableStore, clock: FrozenClock) -> None:
        """A turn is no lease: the owner, an operator and a janitor may resolve the key at the same time."""
        held, token = stood(store, clock, "quarantined")
        due(store, horizon=clock.now)

        assert held.record == found(store, held.key)
        store.complete(held.key, token, PAYLOAD, keep=KEEP)
        assert State.COMPLETED is found(store, held.key).state


def keys(given: Sequence[SeenRecord]) -> list[StorageKey]:
    return [each.key for each in given]
