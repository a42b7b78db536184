"""Asking for a key, and what each answer means to the one who asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Replay
from flask_idempotency.engine.errors import CorruptRecord, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import InFlight, Mismatched, State, StoredPayload, StoredResponse, Unknown
from tests.engine.conftest import House

DONE = StoredResponse(201, metadata=(("Content-Type", "text/plain"),), body=b"paid")


def test_the_first_request_runs_and_its_retry_gets_the_same_answer(house: House) -> None:
    house.won().complete(DONE)

    outcome = house.claim()

    assert isinstance(outcome, Replay)
    assert DONE == outcome.response
    assert ["ClaimGranted", "Completed"] == house.told()


def test_store_calls_per_path_are_two_one_one(house: House) -> None:
    """First request 2, replay 1, conflict 1, mismatch 1: SPEC section 7. Nobody adds one unseen."""
    claim = house.won()
    house.claim()
    house.claim(house.request(body=b"other"))
    claim.complete(DONE)
    house.claim()

    assert ["claim", "claim", "claim", "complete", "claim"] == house.store.calls


def test_a_duplicate_of_a_running_request_learns_the_remaining_lease(house: House) -> None:
    house.won()
    house.clock.advance(12)

    assert InFlight(retry_after=18.0) == house.claim()
    assert ["ClaimGranted", "ConflictRefused"] == house.told()


def test_another_payload_is_a_mismatch_also_while_the_first_runs(house: House) -> None:
    """Before the conflict, because waiting would not help it (P-69)."""
    house.won()

    assert isinstance(house.claim(house.request(body=b"other")), Mismatched)


def test_a_vanished_plain_owner_leaves_an_unknown_outcome(house: House) -> None:
    house.won()
    house.clock.advance(31)

    assert Unknown("lease-expired") == house.claim()
    assert Unknown("lease-expired") == house.claim()


def test_a_vanished_marked_owner_is_taken_over(house: House) -> None:
    first = house.won(effects="marked")
    house.clock.advance(31)

    second = house.won(effects="marked")

    assert 2 == second.attempt
    assert second.fence > first.fence


def test_an_unreadable_answer_is_an_error_and_never_a_run(house: House) -> None:
    claim = house.won()
    payload = StoredPayload(data=b"not an envelope", status=201, success=True, byte_size=4)
    house.store.complete(house.key, claim.contexts[0].token, payload, keep=60.0)

    for _ in range(2):
        with pytest.raises(CorruptRecord):
            house.claim()
    assert "RecordCorrupt" in house.told()


def test_a_claim_that_the_store_did_not_answer_is_given_back(house: House) -> None:
    """The reply was lost, the claim was not: without this the key would be dead until its lease ended."""
    house.store.mute.add("claim")
    with pytest.raises(StoreUnavailable):
        house.claim()
    house.store.mute.clear()
    assert isinstance(house.claim(), InFlight)

    house.pass_time(1)

    assert isinstance(house.claim(), Claim)


def test_giving_back_what_was_never_granted_is_no_lost_lease(house: House) -> None:
    """The store did not answer, and the key was another's all along: nobody lost anything."""
    house.won()
    house.store.down.add("claim")
    with pytest.raises(StoreUnavailable):
        house.claim()
    house.store.down.clear()

    house.pass_time(1)

    assert "LeaseExpired" not in house.told()
    assert isinstance(house.claim(), InFlight)


def test_a_worker_that_dies_in_the_claim_gives_it_back(house: House) -> None:
    claim = house.store._store.claim

    def interrupted(*args: Any, **kwargs: Any) -> None:
        claim(*args, **kwargs)
        raise SystemExit

    house.store._store.claim = interrupted
    with pytest.raises(SystemExit):
        house.claim()
    house.store._store.claim = claim

    house.pass_time(1)

    assert isinstance(house.claim(), Claim)


def test_no_repr_tells_what_a_log_must_not_hold(house: House) -> None:
    claim = house.won()
    token = claim.contexts[0].token
    claim.complete(StoredResponse(201, metadata=(("Location", "/canary"),), body=b"canary"))
    outcome = house.claim()
    assert isinstance(outcome, Replay)

    shown = repr([outcome, house.request(), claim.contexts, outcome.record, outcome.response])

    for canary in ("canary", "acme", "alice", repr(token), repr(house.key.rid), repr(house.request().fingerprint)):
        assert canary not in shown


def test_an_unreadable_record_leaves_nothing_to_look_after(house: House) -> None:
    """It was read, so nothing was granted: a client that goes on asking must not fill the memory."""

    def unreadable(*args: Any, **kwargs: Any) -> None:
        raise CorruptRecord("odd")

    house.store._store.claim = unreadable
    for _ in range(3):
        with pytest.raises(CorruptRecord):
            house.claim()

    assert not house.renewer._due


def test_two_requests_share_no_token(house: House) -> None:
    assert house.won(house.request("a")).contexts[0].token != house.won(house.request("b")).contexts[0].token


class TestWaiting:
    """`in_flight="wait"`: a seat, a bounded wait, and never a write."""

    def test_a_waiter_gets_the_owners_answer(self, house: House) -> None:
        claim = house.won()
        looked = threading.Event()
        read = house.store._store.read
        house.store._store.read = lambda key: (looked.set(), read(key))[1]  # type: ignore[func-returns-value]
        outcomes: list[object] = []
        waiter = threading.Thread(target=lambda: outcomes.append(house.claim(in_flight="wait", wait=3600.0)))
        waiter.start()
        assert looked.wait(60)

        claim.complete(DONE)
        waiter.join(60)

        assert isinstance(outcomes[0], Replay)
        assert DONE == outcomes[0].response

    def test_a_waiter_that_sees_nothing_in_time_is_refused(self, house: House) -> None:
        house.won()
        house.slow_reads(2)

        assert isinstance(house.claim(in_flight="wait", wait=5.0), InFlight)
        assert 6.0 == house.events[-1].waited  # type: ignore[attr-defined]

    def test_p103_a_waiter_never_writes(self, house: House) -> None:
        house.won()
        house.slow_reads(1)
        house.store.calls.clear()

        house.claim(in_flight="wait", wait=5.0)

        assert ["claim", "read"] == list(dict.fromkeys(house.store.calls))

    def test_exactly_one_waiter_runs_after_a_release(self, house: House) -> None:
        claim = house.won()
        barrier = threading.Barrier(3)
        outcomes: list[object] = []

        def wait() -> None:
            barrier.wait(60)
            outcome = house.claim(in_flight="wait", wait=3600.0)
            outcomes.append(outcome)
            if isinstance(outcome, Claim):
                outcome.complete(DONE)

        waiters = [threading.Thread(target=wait) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        barrier.wait(60)
        claim.release("test")
        for waiter in waiters:
            waiter.join(60)

        assert ["Claim", "Replay"] == sorted(type(outcome).__name__ for outcome in outcomes)

    def test_without_a_seat_the_duplicate_is_refused_at_once(self, house: House) -> None:
        house.won()
        with house.around.waiters.slot(house.key), house.around.waiters.slot(house.key):
            house.store.calls.clear()

            assert isinstance(house.claim(in_flight="wait", wait=3600.0), InFlight)
            assert ["claim"] == house.store.calls

    def test_a_waiter_takes_over_from_an_owner_that_vanishes(self, house: House) -> None:
        house.won(effects="marked")
        house.slow_reads(10)

        assert 2 == house.won(effects="marked", in_flight="wait", wait=60.0).attempt

    def test_a_store_that_fails_meanwhile_is_looked_at_again(self, house: House) -> None:
        """The work is being done elsewhere: when the store answers again, so does its owner. That it failed is told once."""
        claim, read = house.won(), house.store.read
        looks = iter([StoreUnavailable, StoreUnavailable, StoreUnavailable])

        def look(key: StorageKey) -> object:
            if (error := next(looks, None)) is not None:
                raise error("down")
            claim.complete(DONE)
            return read(key)

        house.store.read = look

        assert isinstance(house.claim(in_flight="wait", wait=3600.0), Replay)
        assert 1 == house.told().count("StoreFailed")

    def test_a_store_that_stays_away_ends_the_wait_with_what_was_known(self, house: House) -> None:
        """It is known that somebody works on it: an endpoint that runs unprotected without a store must not run now."""
        house.won()
        house.slow_reads(2)
        house.store.mute |= {"read"}

        assert isinstance(house.claim(in_flight="wait", wait=5.0), InFlight)
        assert ["StoreFailed", "ConflictRefused"] == house.told()[-2:]

    def test_a_waiter_asks_a_store_once_that_has_forgotten_its_key(self, house: House) -> None:
        claim, read, ask = house.won(), house.store.read, house.store.claim
        looks, asked = iter([None, None, None]), iter([ask])

        def look(key: StorageKey) -> object:
            try:
                return next(looks)
            except StopIteration:
                claim.complete(DONE)
                house.store.claim = ask
                return read(key)

        def forgotten(*args: Any, **kwargs: Any) -> Any:
            refusals.append("refused")
            raise StoreDataLoss("who?", loss="missing")

        refusals: list[str] = []
        house.store.read = look
        house.store.claim = lambda *args, **kwargs: next(asked, forgotten)(*args, **kwargs)

        assert isinstance(house.claim(in_flight="wait", wait=3600.0), Replay)
        assert ["refused"] == refusals


class TestRotatedSecrets:
    """Two secrets in use: releases that know only one of them still exclude each other."""

    def both(self, house: House) -> tuple[object, ...]:
        return house.request(), house.request(identity=1)

    def test_an_answer_stored_under_the_old_secret_is_replayed(self, house: House) -> None:
        house.won(house.request(identity=1)).complete(DONE)

        outcome = house.claim(house.request(), house.request(identity=1))

        assert isinstance(outcome, Replay)
        assert DONE == outcome.response

    @pytest.mark.parametrize("only", [0, 1])
    def test_a_release_that_knows_one_secret_is_excluded_by_one_that_knows_both(self, house: House, only: int) -> None:
        house.won(house.request(), house.request(identity=1))

        assert isinstance(house.claim(house.request(identity=only)), InFlight)

    @pytest.mark.parametrize("only", [0, 1])
    def test_a_release_that_knows_both_is_excluded_by_one_that_knows_one(self, house: House, only: int) -> None:
        house.won(house.request(identity=only))

        assert isinstance(house.claim(house.request(), house.request(identity=1)), InFlight)
        house.pass_time(1)
        assert house.store.read(house.request(identity=1 - only).key) is None

    def test_retries_of_what_only_the_new_secret_knows_are_all_replayed(self, house: House) -> None:
        """What the retry was granted under the old one is given back before it is answered, and nobody lost a lease."""
        house.won(house.request()).complete(DONE)

        outcomes = [house.claim(house.request(), house.request(identity=1)) for _ in range(3)]

        assert ["Replay"] * 3 == [type(outcome).__name__ for outcome in outcomes]
        assert "LeaseExpired" not in house.told()

    def test_a_waiter_looks_at_the_key_that_refused_it(self, house: House) -> None:
        """Asking for the free one again and again would be writing."""
        house.won(house.request())
        house.slow_reads(1)
        house.store.calls.clear()

        house.claim(house.request(), house.request(identity=1), in_flight="wait", wait=5.0)

        assert ["claim", "claim", "release"] == house.store.calls[:3]
        assert {"read"} == set(house.store.calls[3:])

    def test_an_error_under_one_secret_gives_the_other_back(self, house: House) -> None:
        claim, calls = house.store._store.claim, iter([False, True])

        def second_is_corrupt(*args: Any, **kwargs: Any) -> Any:
            if next(calls):
                raise CorruptRecord("odd")
            return claim(*args, **kwargs)

        house.store._store.claim = second_is_corrupt
        with pytest.raises(CorruptRecord):
            house.claim(house.request(), house.request(identity=1))

        house.pass_time(1)

        assert house.store.read(house.request(identity=1).key) is None

    @pytest.mark.parametrize("only", [0, 1])
    def test_the_answer_is_kept_under_both(self, house: House, only: int) -> None:
        """So that the old secret can be dropped after one `keep`."""
        house.won(house.request(), house.request(identity=1)).complete(DONE)

        assert isinstance(house.claim(house.request(identity=only)), Replay)

    def test_renewing_marking_and_releasing_reach_both(self, house: House) -> None:
        """A lease that lapsed under one secret would let the other's releases in."""
        claim = house.won(house.request(), house.request(identity=1), effects="marked")
        claim.point_of_no_return()
        house.pass_time(20)
        house.pass_time(20)
        for identity in (0, 1):
            record = house.store.read(house.request(identity=identity).key)
            assert record is not None
            assert record.state is State.PROCESSING
            assert record.remaining > 0

        claim.release("test")

        assert [None, None] == [house.store.read(house.request(identity=i).key) for i in (0, 1)]

    def test_the_fence_is_one_that_rises_over_both(self, house: House) -> None:
        first = house.won(house.request(), house.request(identity=1))
        first.release("test")

        assert house.won(house.request(), house.request(identity=1)).fence > first.fence
