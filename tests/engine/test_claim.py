"""Holding a claim: keeping it alive, and settling it whatever the store does meanwhile."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Replay
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreUnavailable
from flask_idempotency.engine.model import InFlight, OnExpiry, State, StoredResponse, Unknown
from flask_idempotency.engine.policy import merge
from tests.engine.conftest import House

DONE = StoredResponse(200, body=b"done")


def odd(*args: object, **kwargs: object) -> None:
    raise CorruptRecord("odd")


def test_p10_renewal_keeps_one_runner_for_many_leases(house: House) -> None:
    house.won()
    for _ in range(30):
        house.pass_time(10)

        assert isinstance(house.claim(), InFlight)


def test_renewal_ends_at_max_runtime(house: House) -> None:
    house.won(max_runtime=60.0)
    for _ in range(10):
        house.pass_time(10)

    assert isinstance(house.claim(), Unknown)


def test_it_knows_whether_the_store_has_its_end(house: House) -> None:
    claim = house.won()
    assert not claim.stored
    house.store.down |= {"complete"}
    claim.complete(DONE)
    assert not claim.stored

    house.store.down.clear()
    house.pass_time(1)
    assert claim.stored


def test_an_end_that_came_too_late_is_not_stored(house: House) -> None:
    claim = house.won(effects="deduplicated")
    house.store.down |= {"complete", "renew"}
    claim.complete(DONE)
    house.clock.advance(3600)
    house.store.down.clear()
    house.won(effects="deduplicated")

    house.pass_time(1)

    assert not claim.stored


@pytest.mark.parametrize("settle", ["complete", "release", "quarantine"])
def test_renewal_ends_with_the_claim(house: House, settle: str) -> None:
    claim = house.won()
    claim.complete(DONE) if settle == "complete" else getattr(claim, settle)("test")
    house.store.calls.clear()

    house.pass_time(100)

    assert [] == house.store.calls


def test_p59_a_store_that_fails_at_complete_costs_the_caller_nothing(house: House) -> None:
    claim = house.won()
    house.store.down |= {"complete"}
    claim.complete(DONE)
    house.pass_time(1)
    assert isinstance(house.claim(), InFlight)

    house.store.down.clear()
    house.pass_time(1)

    assert isinstance(house.claim(), Replay)
    assert ["ClaimGranted", "CompletionRetrying", "ConflictRefused", "Completed"] == house.told()


def test_a_lost_reply_of_complete_is_as_if_it_had_come(house: House) -> None:
    claim = house.won()
    house.store.mute |= {"complete"}
    claim.complete(DONE)
    house.store.mute.clear()
    house.pass_time(1)

    outcome = house.claim()

    assert isinstance(outcome, Replay)
    assert DONE == outcome.response


def test_a_delayed_result_is_taken_from_quarantine(house: House) -> None:
    """The outage outlasted the lease; the answer is known all the same."""
    claim = house.won(max_runtime=3600.0)
    house.store.down |= {"complete"}
    claim.complete(DONE)
    house.clock.advance(100)
    assert isinstance(house.claim(), Unknown)

    house.store.down.clear()
    house.pass_time(1)

    assert isinstance(house.claim(), Replay)


def test_a_result_that_is_never_taken_is_given_up_and_told(house: House) -> None:
    claim = house.won(max_runtime=60.0)
    house.store.down |= {"complete"}
    claim.complete(DONE)

    house.pass_time(61)
    house.pass_time(61)

    assert "CompletionFailed" == house.told()[-1]
    assert isinstance(house.claim(), Unknown)


def test_a_delayed_settlement_that_was_overtaken_is_dropped(house: House) -> None:
    claim = house.won(on_abandoned="takeover")
    house.store.down |= {"complete"}
    claim.complete(DONE)
    house.store.down.clear()
    house.clock.advance(31)
    house.won(on_abandoned="takeover").complete(StoredResponse(200, body=b"theirs"))

    house.renewer.tick()

    outcome = house.claim()
    assert isinstance(outcome, Replay)
    assert b"theirs" == outcome.response.body
    assert "LeaseExpired" in house.told()


def test_a_superseded_owner_learns_of_a_successor_that_still_runs(house: House) -> None:
    slow = house.won(effects="marked")
    house.clock.advance(31)
    house.won(effects="marked")

    assert InFlight(30.0) == house.engine.successor(slow)


def test_an_owner_whose_record_is_gone_learns_that_nothing_is_known(house: House) -> None:
    claim = house.won()
    claim.release("test")

    assert Unknown("lease-lost") == house.engine.successor(claim)


def test_an_owner_that_was_told_of_its_loss_never_delivers_even_if_the_store_is_down(house: House) -> None:
    """Renewal has seen the successor; that the store is silent at the end makes the answer no more ours."""
    slow = house.won(effects="marked")
    house.clock.advance(31)
    house.won(effects="marked")
    house.renewer.tick()
    house.store.down |= {"complete"}

    with pytest.raises(LeaseLost):
        slow.complete(DONE)

    assert 1 == house.told().count("LeaseExpired")
    assert "CompletionRetrying" not in house.told()


def test_a_successor_with_another_request_is_nobodys_answer(house: House) -> None:
    """The store forgot, and the key was used for something else: its answer is not this caller's."""
    claim = house.won()
    claim.release("forgotten")
    house.won(house.request(body=b"other")).complete(DONE)

    assert Unknown("lease-lost") == house.engine.successor(claim)


def test_a_renewal_that_fails_oddly_is_tried_again_before_the_lease_ends(house: House) -> None:
    house.won(lease=0.9)
    house.store._store.renew, renew = odd, house.store._store.renew
    house.pass_time(0.3)
    house.store._store.renew = renew

    house.pass_time(0.3)
    house.pass_time(0.3)
    house.pass_time(0.3)

    assert isinstance(house.claim(), InFlight)
    assert 1 == house.told().count("RenewalFailed")


def test_a_settlement_that_can_never_be_taken_is_given_up(house: House) -> None:
    """The record became unreadable: asking for ever would fill the log and the memory."""
    claim = house.won()
    house.store.down |= {"complete"}
    claim.complete(DONE)
    house.store.down.clear()
    house.store._store.complete = odd

    house.pass_time(1)
    house.pass_time(100)

    assert 1 == house.told().count("CompletionFailed")
    assert not house.renewer._due


def test_a_delayed_settlement_is_made_once(house: House) -> None:
    """Also when the background thread had the claim in hand while it was being settled."""
    claim = house.won()
    house.store.down |= {"complete"}
    claim.complete(DONE)
    house.store.down.clear()

    claim.run()
    house.pass_time(100)

    assert 1 == house.told().count("Completed")


def test_the_end_of_renewing_is_told(house: House) -> None:
    house.won(max_runtime=60.0)
    for _ in range(10):
        house.pass_time(10)

    assert 1 == house.told().count("MaxRuntimeExceeded")


def test_a_late_settlement_is_repeated_as_long_as_an_early_one(house: House) -> None:
    """The time for repeating is counted from the settlement, not from the claim."""
    claim = house.won(max_runtime=60.0)
    house.clock.advance(59)
    house.store.down |= {"complete"}
    claim.complete(DONE)
    for _ in range(5):
        house.pass_time(10)
    house.store.down.clear()

    house.pass_time(1)

    assert isinstance(house.claim(), Replay)


def test_the_point_of_no_return_turns_take_over_into_quarantine(house: House) -> None:
    house.won(effects="marked").point_of_no_return()
    house.clock.advance(31)

    assert isinstance(house.claim(effects="marked"), Unknown)


def test_the_point_of_no_return_costs_nothing_where_it_changes_nothing(house: House) -> None:
    plain = house.won()
    plain.point_of_no_return()
    assert "mark_point_of_no_return" not in house.store.calls
    assert plain.past_point

    marked = house.won(house.request("other", policy=merge(house.policy, {"effects": "marked"})), effects="marked")
    marked.point_of_no_return()
    marked.point_of_no_return()

    assert 1 == house.store.calls.count("mark_point_of_no_return")


def test_a_point_that_the_store_was_not_told_of_is_not_passed(house: House) -> None:
    claim = house.won(effects="marked")
    house.store.down |= {"mark_point_of_no_return"}

    with pytest.raises(StoreUnavailable):
        claim.point_of_no_return()

    assert not claim.past_point


def test_what_cannot_be_stored_leaves_a_tombstone(house: House) -> None:
    """The work was done: a retry must not do it again because a header was odd."""
    house.won().complete(StoredResponse(200, metadata=(("X-Odd", "a\r\nb"),), body=b"x"))

    outcome = house.claim()

    assert isinstance(outcome, Replay)
    assert (200, False, b"") == (
        outcome.response.status,
        outcome.response.kept,
        outcome.response.body,
    )


def test_a_held_claim_can_still_be_completed_by_its_owner(house: House) -> None:
    claim = house.won()
    claim.quarantine("effect-unknown")
    assert Unknown("effect-unknown") == house.claim()

    claim.complete(DONE)

    assert isinstance(house.claim(), Replay)


def test_what_the_record_says_for_the_case_of_a_lapse_is_frozen_at_the_claim(house: House) -> None:
    """A deployment that changes the policy does not reinterpret what runs."""
    house.won()
    house.clock.advance(31)

    assert isinstance(house.claim(effects="marked"), Unknown)
    record = house.store.read(house.key)
    assert (State.QUARANTINED, OnExpiry.QUARANTINE) == (record.state, record.on_expiry)


def test_an_observer_that_fails_breaks_nothing(house: House, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: object) -> None:
        raise ValueError("metrics are down")

    house.around.observers.add(fail)

    assert isinstance(house.claim(), Claim)
    assert "an observer failed on ClaimGranted" in caplog.text
