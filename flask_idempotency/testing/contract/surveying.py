"""Who looks after a store sees what is in it: every record by its state, and how many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency.engine.model import State
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    granted,
    near,
    stand,
)
from flask_idempotency.testing.contract.finding import (
    STANDINGS,
    UnsettledStore,
    condemned,
    noticed,
    outline,
    seen,
    stood,
    walked,
)

STATES: dict[Standing, State] = {
    "in flight": State.PROCESSING,
    "completed": State.COMPLETED,
    "quarantined": State.QUARANTINED,
    "lapsed, takeover": State.PROCESSING,
    "lapsed, quarantine": State.PROCESSING,
}


class Surveying:
    """`walk` and `standing`. There may be others' records beside a test's own."""

    @pytest.mark.parametrize("standing", STANDINGS)
    def test_a_record_is_met_in_its_state_alone(
        self, store: UnsettledStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """With its key and its record; the bytes of its answer may be left out."""
        stood_so, _ = stood(store, clock, standing)
        key, record = stood_so.key, outline(stood_so.record)

        for state in State:
            met = {k: outline(r) for k, r in walked(store, state, tid=key.tid).items()}
            assert ({key: record} if state is STATES[standing] else {}) == met

    def test_the_condemned_are_quarantined(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """And an answer by another's hand is as good as any."""
        damaged, _ = condemned(store, clock)
        assert [damaged.key] == list(walked(store, State.QUARANTINED, tid=damaged.key.tid))
        assert store.unsettled.settle(damaged, token=a_token(), payload=PAYLOAD, keep=KEEP)

        assert [damaged.key] == list(walked(store, State.COMPLETED, tid=damaged.key.tid))
        assert walked(store, State.QUARANTINED, tid=damaged.key.tid) == {}

    @pytest.mark.parametrize("state", list(State))
    @pytest.mark.parametrize("limit", (1, 3, 1000))
    def test_every_record_is_met(self, store: UnsettledStore, clock: FrozenClock, state: State, limit: int) -> None:
        """However long the sheets are, of this tenant and of no other; without a tenant, of all."""
        standings: dict[State, Standing] = {
            State.PROCESSING: "in flight",
            State.COMPLETED: "completed",
            State.QUARANTINED: "quarantined",
        }
        tid, other = a_key().tid, a_key()
        keys = {a_key(tid=tid) for _ in range(7)}
        for key in (*keys, other):
            stand(store, clock, key, standings[state])

        assert keys == walked(store, state, limit=limit, tid=tid).keys()
        assert {*keys, other} <= walked(store, state).keys()

    def test_what_is_there_throughout_is_met(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """While others leave, and more come."""
        tid = a_key().tid
        owners = {a_key(tid=tid): a_token() for _ in range(12)}
        for key, token in owners.items():
            granted(store.claim(a_request(key), token=token, lease=LEASE))
        met, leaving, after = set(), list(owners)[::2], b""
        while True:
            sheet = store.unsettled.walk(State.PROCESSING, after=after, limit=2, tid=tid)
            met |= {each.key for each in sheet.found}
            if leaving:
                store.release(key := leaving.pop(), owners[key])
            if sheet.after is None:
                break
            after = sheet.after

        assert set(list(owners)[1::2]) <= met <= owners.keys()

    def test_answers_whose_life_is_over_are_left_out(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """Whether or not they have been removed."""
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP - 0.125)
        assert [answered.key] == list(walked(store, State.COMPLETED, tid=answered.key.tid))
        clock.advance(0.125)

        assert walked(store, State.COMPLETED, tid=answered.key.tid) == {}

    def test_what_is_not_completed_is_counted(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """As it comes, changes, and goes."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        counts = store.unsettled.standing()

        flying, owner = stood(store, clock, "in flight")
        counts = replace(counts, in_flight=counts.in_flight + 1)
        assert counts == store.unsettled.standing()
        store.complete(flying.key, owner, PAYLOAD, keep=KEEP)
        counts = replace(counts, in_flight=counts.in_flight - 1)
        assert counts == store.unsettled.standing()
        store.condemn(flying.key, PAYLOAD)
        now = store.unsettled.standing()
        assert counts.quarantined + 1 == now.quarantined
        assert store.unsettled.free(seen(store, flying.key))
        assert counts == store.unsettled.standing()
        store.renew(lapsed.key, token, lease=LEASE)
        now = store.unsettled.standing()
        assert (counts.in_flight + 1, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        store.hold(lapsed.key, token, "view-crashed")
        now = store.unsettled.standing()
        assert (counts.in_flight, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        assert counts.quarantined + 1 == now.quarantined

    def test_a_janitor_moves_one_from_lapsed_to_quarantined(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """And whoever settles it takes it from there."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")
        before = store.unsettled.standing()
        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        now = store.unsettled.standing()

        assert (before.lapsed - 1, before.quarantined + 1) == (now.lapsed, now.quarantined)
        assert before.in_flight == now.in_flight
        assert store.unsettled.settle(seen(store, lapsed.key), token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert before.quarantined == store.unsettled.standing().quarantined

    def test_a_lease_that_ends_is_told_by_nobody(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """What was in flight has lapsed at that moment, with nothing written."""
        stood(store, clock, "in flight")
        before = store.unsettled.standing()
        clock.advance(LEASE)
        now = store.unsettled.standing()

        assert before.in_flight + before.lapsed == now.in_flight + now.lapsed
        assert now.lapsed > before.lapsed

    def test_it_is_told_for_how_long(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """The one that has waited longest says it; others' may be older than a test's own."""
        noticed(store, clock)
        stood(store, clock, "lapsed, takeover")
        clock.advance(400 * 86400)
        standing = store.unsettled.standing()

        assert standing.lapsed_for is not None
        assert standing.quarantined_for is not None
        assert standing.lapsed_for >= 400 * 86400
        assert standing.quarantined_for >= 400 * 86400
        clock.advance(10)
        later = store.unsettled.standing()
        assert later.lapsed_for == near(standing.lapsed_for + 10)
        assert later.quarantined_for == near(standing.quarantined_for + 10)

    def test_no_time_is_told_of_none(self, store: UnsettledStore, clock: FrozenClock) -> None:
        """And no quarantine has lasted for less than no time: one that is held begins before its lease is over."""
        stood(store, clock, "quarantined")
        standing = store.unsettled.standing()

        assert (standing.lapsed_for is None) == (standing.lapsed == 0)
        assert standing.quarantined_for is not None
        assert standing.quarantined_for >= 0
