"""The verbs that settle a key in its owner's place, without a command line: for a console, or a script."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.operations.records import (
    AuditNote,
    Case,
    Refused,
    ResolveReport,
    alive,
    complete,
    doubts,
    handle_of,
    key_of,
    release,
)
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, Standing, a_key, found, stand

WORD = AuditNote("ops", "asked the bank")


class Desk:
    """A store with one key, and somebody who may settle it."""

    def __init__(self, standing: Standing) -> None:
        self.clock = FrozenClock()
        self.store = MemoryStore(clock=self.clock)
        self.key = a_key()
        self.token = stand(self.store, self.clock, self.key, standing)
        self.settler = Settler(self.store.recovery, EnvelopeCodec(), lambda event: None, label=lambda key: "label")

    @property
    def case(self) -> Case:
        return Case((SeenRecord(self.key, found(self.store, self.key)),))


@pytest.mark.parametrize("standing", ("in flight", "completed", "lapsed, takeover", "lapsed, quarantine"))
def test_only_what_is_quarantined_is_completed_or_reopened(standing: Standing) -> None:
    desk = Desk(standing)
    before = desk.case

    with pytest.raises(Refused):
        complete(desk.settler, before, StoredResponse(201), WORD, Policy(keep=KEEP))
    with pytest.raises(Refused):
        complete(desk.settler, before, None, WORD, Policy(keep=KEEP))
    assert before == desk.case


def test_what_is_quarantined_is_completed_once() -> None:
    desk = Desk("quarantined")
    seen = desk.case

    assert [ResolveReport(1, left=0), ResolveReport(0, left=1)] == [
        complete(desk.settler, seen, StoredResponse(201), WORD, Policy(keep=KEEP)) for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("standing", "doubtful"),
    (("in flight", True), ("lapsed, quarantine", True), ("completed", True), ("quarantined", False)),
)
def test_there_are_doubts_of_whatever_was_done_or_may_go_on(standing: Standing, doubtful: bool) -> None:
    """And of what its own owner has given up until its lease is over: what it has sent may be on its way."""
    desk = Desk(standing)

    assert doubts(desk.case, Policy())[0]
    desk.clock.advance(LEASE)
    assert doubtful is bool(doubts(desk.case, Policy())[0])


@pytest.mark.parametrize(
    ("standing", "doubtful"), (("in flight", True), ("lapsed, quarantine", True), ("quarantined", False))
)
def test_of_an_endpoint_that_is_not_known_no_silent_owner_is_ever_gone(standing: Standing, doubtful: bool) -> None:
    desk = Desk(standing)
    desk.clock.advance(1e6)

    assert [] == doubts(desk.case, Policy())[0]
    assert int(doubtful) == len(doubts(desk.case, Policy(), known=False)[0])


def test_an_owner_may_live_until_its_runtime_is_over() -> None:
    desk = Desk("in flight")
    policy = Policy(lease=LEASE, max_runtime=100)
    lives = [alive(desk.case.first.record, policy) is not None]
    for seconds in (LEASE + 99.9, 0.1):
        desk.clock.advance(seconds)
        lives.append(alive(desk.case.first.record, policy) is not None)

    assert [True, True, False] == lives


def test_whether_it_is_wise_is_not_asked_by_the_verb() -> None:
    desk = Desk("completed")

    assert ResolveReport(1, left=0) == release(desk.settler, desk.case, WORD, forced=True)
    assert desk.store.read(desk.key) is None


def test_a_handle_leads_back_to_its_record_and_to_nothing_else() -> None:
    key = a_key()
    handle = handle_of(key)

    assert (key, 77) == (key_of(handle), len(handle))
    for wrong in (handle[:-1], handle + "a", handle[:-1] + "1", "", "ü" * 77):
        with pytest.raises(Refused):
            key_of(wrong)


SPELLED = {0.9: "0 s", -5: "0 s", 59: "59 s", 60: "1 min", 888: "14 min 48 s", 3605: "1 h", 90000: "1 d 1 h"}


def test_a_duration_is_written_in_its_two_largest_units() -> None:
    assert SPELLED == {seconds: format_duration(seconds) for seconds in SPELLED}


def test_a_time_is_written_in_utc() -> None:
    assert "2001-09-09T01:46:40.250Z" == moment(1_000_000_000.25)


SAFE = ("deduplicated", "transactional")


@pytest.mark.parametrize("effects", ("plain", "marked", *SAFE))
def test_where_a_second_run_does_no_harm_three_silent_leases_are_enough(effects: Any) -> None:
    policy = Policy(lease=LEASE, effects=effects)
    desk = Desk("lapsed, takeover" if effects != "plain" else "lapsed, quarantine")
    desk.clock.now = desk.case.first.record.deadline
    desk.store.renew(desk.key, desk.token, lease=LEASE)
    desk.clock.advance(3 * LEASE - 0.5)
    assert doubts(desk.case, policy)[0]
    desk.clock.advance(0.5)

    assert bool(doubts(desk.case, policy)[0]) is (effects not in SAFE)
    assert alive(desk.case.first.record, policy) is not None


@pytest.mark.parametrize("effects", SAFE)
def test_an_owner_that_renews_never_counts_as_gone(effects: Any) -> None:
    policy = Policy(lease=LEASE, effects=effects)
    desk = Desk("lapsed, takeover")
    desk.clock.now = desk.case.first.record.deadline

    for _ in range(20):
        desk.store.renew(desk.key, desk.token, lease=LEASE)
        desk.clock.advance(LEASE / 3)
        assert doubts(desk.case, policy)[0]


@pytest.mark.parametrize("effects", SAFE)
def test_a_claim_under_another_rule_waits_for_the_whole_runtime(effects: Any) -> None:
    """It was `plain` when it was claimed, and the policy has changed since. Nobody knows what a second run would do."""
    desk = Desk("lapsed, quarantine")
    desk.clock.advance(100 * LEASE)
    patient = Policy(lease=LEASE, effects=effects, on_abandoned="quarantine", max_runtime=1000 * LEASE)

    assert doubts(desk.case, Policy(lease=LEASE, effects=effects, max_runtime=1000 * LEASE))[0]
    assert [] == doubts(desk.case, patient)[0]


def test_the_runtime_is_the_most_that_is_waited_for() -> None:
    desk = Desk("lapsed, takeover")
    policy = Policy(lease=LEASE, max_runtime=LEASE, effects="deduplicated")
    desk.clock.now = desk.case.first.record.deadline + LEASE

    assert [] == doubts(desk.case, policy)[0]


def test_the_way_out_names_the_seconds_and_the_word() -> None:
    desk = Desk("lapsed, takeover")
    desk.clock.now = desk.case.first.record.deadline + 0.5
    told = [doubts(desk.case, Policy(lease=30, effects=effects))[1] for effects in ("plain", "deduplicated")]

    assert ["Repeat this in 900 s", "Repeat this in 60 s"] == [each.partition(",")[0] for each in told]
    assert all("--force" in each for each in told)
    for hopeless in (
        doubts(desk.case, Policy(), known=False)[1],
        doubts(Desk("completed").case, Policy())[1],
    ):
        assert hopeless == "To release it all the same: --force."
