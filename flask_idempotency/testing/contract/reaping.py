"""A janitor finds the claims of vanished owners, and quarantines what nobody else has touched meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnLapse, Replayed, State, Unknown
from flask_idempotency.testing.clock import FrozenClock
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
from flask_idempotency.testing.contract.finding import UnsettledStore, begin_anew, condemned, stale, stood
from flask_idempotency.testing.contract.racing import ROUNDS, THREADS, at_once

AGES = 400 * 86400.0


class Reaping:
    """`stale` and `lapse`: whoever was faster has won, and an answer is never cast doubt on."""

    @pytest.mark.parametrize("standing", ("lapsed, takeover", "lapsed, quarantine"))
    def test_a_lapsed_record_is_stale(self, store: UnsettledStore, clock: FrozenClock, standing: Standing) -> None:
        """With its key and all that it says, whatever its rule."""
        lapsed, _ = stood(store, clock, standing)

        assert lapsed.record == stale(store, horizon=clock.now)[lapsed.key]

    def test_what_is_settled_or_in_flight_is_not_stale(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """The quarantined have been seen to already; an answer ends in its own way."""
        quarantined, _ = stood(store, clock, "quarantined")
        answered, _ = stood(store, clock, "completed")
        clock.advance(LEASE + 1)
        flying, _ = stood(store, clock, "in flight")
        released, token = stood(store, clock, "in flight")
        store.release(released.key, token)
        not_stale = {each.key for each in (quarantined, answered, flying, released)}

        assert not not_stale & stale(store, horizon=clock.now + LEASE - 1).keys()

    def test_a_lease_that_ended_after_the_horizon_is_not_stale(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """The store's clock may have been set forward: the janitor's own says what is over."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert lapsed.key not in stale(store, horizon=lapsed.record.deadline - 0.125)
        assert lapsed.key in stale(store, horizon=lapsed.record.deadline + 0.125)

    def test_a_lease_that_has_not_ended_is_not_stale(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Whatever the horizon: the janitor's clock may be the wrong one."""
        flying, _ = stood(store, clock, "in flight")
        clock.advance(LEASE - 0.125)
        assert flying.key not in stale(store, horizon=clock.now + AGES)
        clock.advance(0.25)
        assert flying.key in stale(store, horizon=clock.now + AGES)

    @pytest.mark.parametrize("limit", (1, 3, 1000))
    def test_every_stale_record_is_met(self, store: UnsettledStore, clock: FrozenClock, limit: int) -> None:
        """However long the sheets are, and however many leases ended in one moment."""
        keys = [a_key() for _ in range(7)]
        for key in keys:
            granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        clock.advance(LEASE)

        assert set(keys) <= stale(store, horizon=clock.now, limit=limit).keys()

    def test_what_stays_stale_is_met_although_others_do_not(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Sheets are taken while records come and go."""
        owners = {a_key(): a_token() for _ in range(12)}
        for key, token in owners.items():
            granted(store.claim(a_request(key), token=token, lease=LEASE))
        clock.advance(LEASE)
        met, changed, after = set[StorageKey](), list(owners)[::2], b""
        while True:
            sheet = store.unsettled.stale(horizon=clock.now, after=after, limit=2)
            met |= {each.key for each in sheet.found}
            if changed:
                store.complete(key := changed.pop(), owners[key], PAYLOAD, keep=KEEP)
            stand(store, clock, a_key(), "in flight")
            if sheet.after is None:
                break
            after = sheet.after

        assert set(list(owners)[1::2]) <= met

    def test_a_lapsed_record_is_quarantined_as_it_is(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """With its token, its fence and its lease: the owner may yet come back. Retries hear that nobody knows."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        assert replace(lapsed.record, state=State.QUARANTINED, reason="lease-expired") == found(store, lapsed.key)
        assert lapsed.key not in stale(store, horizon=clock.now)
        assert Unknown("lease-expired") == store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)

    def test_what_is_to_be_taken_over_is_not_quarantined(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """The next retry runs it: only that knows the request."""
        lapsed, _ = stood(store, clock, "lapsed, takeover")

        assert not store.unsettled.lapse(lapsed, horizon=clock.now)
        assert lapsed.record == found(store, lapsed.key)
        assert granted(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)).attempt == 2

    def test_a_lease_that_ended_after_the_horizon_does_not_lapse(
        self, store: UnsettledStore, clock: FrozenClock
    ) -> None:
        """It was met by somebody whose horizon was another."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")

        assert not store.unsettled.lapse(lapsed, horizon=lapsed.record.deadline - 0.125)
        assert lapsed.record == found(store, lapsed.key)

    def test_a_lease_that_is_not_over_does_not_lapse(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Whatever the horizon, and whoever saw it lapse before the store's clock was set back."""
        flying, _ = stood(store, clock, "in flight")
        lapsed, _ = stood(store, clock, "lapsed, quarantine")
        clock.advance(-LEASE)

        for each in (flying, lapsed):
            assert not store.unsettled.lapse(each, horizon=clock.now + AGES)
            assert State.PROCESSING is found(store, each.key).state

    @pytest.mark.parametrize("event", ("renewed", "taken over", "completed", "held", "lapsed", "freed", "begun anew"))
    def test_what_does_not_stand_as_it_was_seen_does_not_lapse(
        self, store: UnsettledStore, clock: FrozenClock, event: str
    ) -> None:
        """Also when what is there by now has lapsed in its turn."""
        taken_over = event == "taken over"
        lapsed, token = stood(store, clock, "lapsed, takeover" if taken_over else "lapsed, quarantine")
        events: dict[str, Callable[[], object]] = {
            "renewed": lambda: store.renew(lapsed.key, token, lease=LEASE),
            "taken over": lambda: granted(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)),
            "completed": lambda: store.complete(lapsed.key, token, PAYLOAD, keep=KEEP),
            "held": lambda: store.hold(lapsed.key, token, "view-crashed"),
            "lapsed": lambda: store.unsettled.lapse(lapsed, horizon=clock.now),
            "freed": lambda: store.release(lapsed.key, token),
            "begun anew": lambda: begin_anew(store, lapsed.key, token),
        }
        events[event]()
        clock.advance(2 * LEASE)
        before = store.read(lapsed.key)

        assert not store.unsettled.lapse(lapsed, horizon=clock.now)
        assert before == store.read(lapsed.key)

    def test_what_has_not_lapsed_cannot_be_lapsed(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """However it was seen: completed, condemned, held."""
        answered, _ = stood(store, clock, "completed")
        damaged, _ = condemned(store, clock)
        held, _ = stood(store, clock, "quarantined")
        clock.advance(2 * LEASE)
        for each in (answered, damaged, held):
            before = found(store, each.key)

            assert not store.unsettled.lapse(Found(each.key, before), horizon=clock.now)
            assert before == found(store, each.key)

    def test_a_late_owner_may_still_say_what_it_has_done(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """It was slow, not dead: its answer ends the quarantine, and is as good as ever."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)

        assert (found(store, lapsed.key).state, found(store, lapsed.key).reason) == (State.COMPLETED, "")
        assert isinstance(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE), Replayed)
        assert not store.unsettled.lapse(lapsed, horizon=clock.now)
        assert found(store, lapsed.key).payload == PAYLOAD

    def test_a_late_owner_may_still_say_that_nothing_was_done(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """It alone knows."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        store.release(lapsed.key, token)

        assert store.read(lapsed.key) is None

    def test_of_many_janitors_one_quarantines(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """So that it is told once."""
        for _ in range(ROUNDS):
            lapsed, _ = stood(store, clock, "lapsed, quarantine")

            done = at_once(*[lambda lapsed=lapsed: store.unsettled.lapse(lapsed, horizon=clock.now)] * THREADS)
            assert [each for each in done if each] == [True]

    def test_a_janitor_and_a_late_owner_do_not_harm_each_other(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """In whatever order they come, the answer is there in the end."""
        for _ in range(ROUNDS):
            lapsed, token = stood(store, clock, "lapsed, quarantine")

            def finish(lapsed: Found = lapsed, token: bytes = token) -> bool:
                store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)
                return True

            def reap(lapsed: Found = lapsed) -> bool:
                store.unsettled.lapse(lapsed, horizon=clock.now)
                return True

            assert at_once(finish, reap) == [True, True]
            assert (found(store, lapsed.key).state, found(store, lapsed.key).payload) == (State.COMPLETED, PAYLOAD)

    def test_a_janitor_and_a_retry_do_not_both_decide(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """What is taken over is in flight; what is quarantined is not taken over."""
        for on_lapse in OnLapse:
            standing: Standing = "lapsed, takeover" if on_lapse is OnLapse.TAKEOVER else "lapsed, quarantine"
            lapsed, token = stood(store, clock, standing)

            def retry(lapsed: Found = lapsed) -> object:
                return store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE)

            def reap(lapsed: Found = lapsed) -> object:
                return store.unsettled.lapse(lapsed, horizon=clock.now)

            at_once(retry, reap)
            record = found(store, lapsed.key)
            if on_lapse is OnLapse.TAKEOVER:
                assert (record.state, record.attempt) == (State.PROCESSING, 2)
                with pytest.raises(LeaseLost):
                    store.complete(lapsed.key, token, PAYLOAD, keep=KEEP)
            else:
                assert (record.state, record.attempt) == (State.QUARANTINED, 1)
