"""Contract of resolving: an operator or a resolver completes or releases the record of a vanished worker."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.model import OnExpiry, Record, State
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    LONG,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
    Contract,
    Kit,
    Quarantined,
    Standing,
    a_token,
    for_each,
    near,
)

# An operator or a resolver lets a key run again.


class ForceReleasing(Contract):
    """`force_release`: the key is as unused, except for its fence."""

    @for_each("standing", (*STANDINGS, "condemned"))
    def test_a_key_is_freed_whatever_state_it_is_in(self, kit: Kit, standing: Standing | Quarantined) -> None:
        """The next claim gets it, from any request, with a higher fence.

        No key may open a condemned response. The operator who releases it must know that the request completed.
        """
        seen, _ = kit.stood(standing)

        assert kit.store.recovery.force_release(seen)
        assert kit.store.read(seen.key) is None
        grant = kit.granted(seen.key, fingerprint=OTHER_FINGERPRINT)
        assert (grant.attempt, grant.fence > seen.record.fence) == (1, True)

    def test_a_worker_that_passed_its_point_since_keeps_its_key(self, kit: Kit) -> None:
        """Its lease may be over. What it does from there on may have an effect, so the record has changed."""
        seen, late = kit.stood("lapsed, takeover")
        kit.store.mark_point_of_no_return(seen.key, late)

        assert not kit.store.recovery.force_release(seen)
        assert kit.found(seen.key).token == late

    @for_each("standing", STANDINGS)
    def test_its_owner_has_lost_it(self, kit: Kit, standing: Standing) -> None:
        """It can neither complete nor keep what is not its own any more; and what comes after it stays untouched."""
        seen, late = kit.stood(standing)
        assert kit.store.recovery.force_release(seen)
        assert kit.accepted(seen.key, late) == ["release"]
        assert kit.store.read(seen.key) is None

        kit.stand(seen.key, "in flight")
        with kit.unchanged(seen.key):
            assert kit.accepted(seen.key, late) == []

    def test_what_is_free_is_not_freed(self, kit: Kit) -> None:
        """Again, after its response has expired, and if it never existed."""
        freed, _ = kit.stood("quarantined")
        assert kit.store.recovery.force_release(freed)
        answered, _ = kit.stood("completed")
        kit.advance(KEEP)

        for each in (freed, answered, SeenRecord(kit.key(), freed.record)):
            assert not kit.store.recovery.force_release(each)
            assert kit.store.read(each.key) is None

    @for_each("event", ("renewed", "taken over", "completed", "held", "begun again"))
    def test_what_does_not_stand_as_it_was_seen_is_not_freed(self, kit: Kit, event: str) -> None:
        """The operator decided before the response was stored."""
        key, token = kit.begin(on_expiry=OnExpiry.TAKEOVER)
        kit.advance(LEASE)
        lapsed = kit.seen(key)
        kit.changes(key, token)[event]()
        with kit.unchanged(key):
            assert not kit.store.recovery.force_release(lapsed)

    def test_another_claim_of_the_same_moment_is_not_freed(self, kit: Kit) -> None:
        """Both leases have the same deadline, so only the token tells them apart."""
        first, token = kit.stood("in flight")
        kit.begin_anew(first.key, token)
        assert first.record.deadline == kit.found(first.key).deadline

        with kit.unchanged(first.key):
            assert not kit.store.recovery.force_release(first)

    def test_a_later_response_is_not_released(self, kit: Kit) -> None:
        """Its key has run again since the operator saw the first claim."""
        answered, _ = kit.stood("completed")
        kit.advance(KEEP)
        kit.stand(answered.key, "completed")
        with kit.unchanged(answered.key):
            assert not kit.store.recovery.force_release(answered)

    def test_a_key_is_freed_once(self, kit: Kit) -> None:
        """One of many calls does it. No call releases a later claim."""
        for _ in range(ROUNDS):
            held, _ = kit.stood("quarantined")

            assert at_once(*[partial(kit.store.recovery.force_release, held)] * THREADS).count(True) == 1

    def test_an_answer_and_who_frees_its_key_do_not_both_win(self, kit: Kit) -> None:
        """Either the response is stored and stays, or the key is free and its owner gets `LeaseLost`."""
        for _ in range(ROUNDS):
            flying, token = kit.stood("in flight")
            finish = partial(kit.completes, flying.key, token)

            finished, freed = at_once(finish, partial(kit.store.recovery.force_release, flying))
            assert (True, finished) == (finished is not freed, kit.store.read(flying.key) is not None)


class Resolving(Contract):
    """`resolve`: from now on this is the response, and the owner gets `LeaseLost`."""

    @for_each("how", get_args(Quarantined))
    def test_what_is_quarantined_is_completed(self, kit: Kit, how: Quarantined) -> None:
        """Under the fresh token, with the fence and the story it had; and its life begins now."""
        quarantined, _ = kit.stood(how)
        kit.advance(LONG)
        token = a_token()

        assert kit.resolve(quarantined, OTHER_PAYLOAD, token=token)
        record = kit.found(quarantined.key)
        assert (near(kit.now), near(kit.now + KEEP)) == (record.completed_at, record.deadline)
        assert record == replace(
            quarantined.record,
            state=State.COMPLETED,
            token=token,
            payload=OTHER_PAYLOAD,
            reason="",
            completed_at=record.completed_at,
            deadline=record.deadline,
            remaining=record.remaining,
        )
        assert record == kit.ask(quarantined.key)

    def test_an_answer_by_another_ends_as_any_other(self, kit: Kit) -> None:
        """Its key is free then."""
        held, _ = kit.stood("quarantined")
        assert kit.resolve(held)
        kit.advance(KEEP - 0.125)
        assert isinstance(kit.ask(held.key), Record)
        kit.advance(0.125)

        assert kit.granted(held.key).fence > held.record.fence

    def test_the_owner_has_lost_it(self, kit: Kit) -> None:
        """It must not send another response than all retries get, and changes nothing."""
        held, token = kit.stood("quarantined")
        assert kit.resolve(held)
        with kit.unchanged(held.key):
            assert kit.accepted(held.key, token) == []

    def test_a_repeated_settlement_is_done(self, kit: Kit) -> None:
        """With the same token, after a lost reply. What was stored first stays, and lives no longer."""
        held, _ = kit.stood("quarantined")
        token = a_token()
        assert kit.resolve(held, token=token)
        with kit.unchanged(held.key):
            assert kit.store.recovery.resolve(held, token=token, payload=OTHER_PAYLOAD, keep=10 * KEEP)

    def test_a_second_settlement_is_refused(self, kit: Kit) -> None:
        """Another token belongs to another resolver: two resolvers may have different results."""
        held, _ = kit.stood("quarantined")
        assert kit.resolve(held)
        before = kit.found(held.key)

        for each in (held, SeenRecord(held.key, before)):
            assert not kit.resolve(each, OTHER_PAYLOAD)
        assert before == kit.found(held.key)

    @for_each("standing", ("in flight", "completed", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_quarantined_is_not_settled(self, kit: Kit, standing: Standing) -> None:
        """Its owner may be running, or a retry will take over, or the owner has completed it."""
        other, _ = kit.stood(standing)

        assert not kit.resolve(other, OTHER_PAYLOAD)
        assert other.record == kit.found(other.key)

    @for_each("event", ("completed", "condemned", "released", "begun again", "lapsed again"))
    def test_what_does_not_stand_as_it_was_seen_is_not_settled(self, kit: Kit, event: str) -> None:
        """Its owner was faster, or the record is of another claim: the seen record no longer exists."""
        held, token = kit.stood("quarantined")
        if event in ("completed", "condemned"):
            kit.store.complete(held.key, token, PAYLOAD, keep=KEEP)
            if event == "condemned":
                kit.store.mark_corrupt(held.key, PAYLOAD)
        else:
            kit.store.release(held.key, token)
            if event == "begun again":
                kit.stand(held.key, "in flight")
            if event == "lapsed again":
                kit.stand(held.key, "quarantined")
        before = kit.store.read(held.key)

        assert not kit.resolve(held, OTHER_PAYLOAD)
        assert before == kit.store.read(held.key)

    def test_what_was_seen_in_flight_is_not_settled(self, kit: Kit) -> None:
        """Even if it is quarantined by now, because the resolver has not seen that."""
        in_flight, token = kit.stood("in flight")
        kit.store.quarantine(in_flight.key, token, "view-crashed")
        with kit.unchanged(in_flight.key):
            assert not kit.resolve(in_flight)

    def test_an_expired_response_is_not_resolved(self, kit: Kit) -> None:
        """The record is gone by then, and the call changes no record."""
        held, token = kit.stood("quarantined")
        kit.store.complete(held.key, token, PAYLOAD, keep=KEEP)
        kit.advance(KEEP)

        assert not kit.resolve(held)
        assert kit.store.read(held.key) is None

    @for_each("keep", (0.0, -1.0, math.inf, math.nan))
    def test_an_answer_by_another_without_an_end_is_refused(self, kit: Kit, keep: float) -> None:
        """The store keeps it as long as its owner's response."""
        held, _ = kit.stood("quarantined")
        with pytest.raises(ValueError, match="duration"):
            kit.store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=keep)

        assert held.record == kit.found(held.key)

    def test_of_many_who_settle_one_does(self, kit: Kit) -> None:
        """Each resolver has another response, and all retries get the same one."""
        for _ in range(ROUNDS):
            held, _ = kit.stood("quarantined")
            answers = [replace(PAYLOAD, data=b"%d" % number) for number in range(THREADS)]
            done = at_once(*[partial(kit.resolve, held, answer) for answer in answers])

            assert [kit.found(held.key).payload] == [
                answer for answer, settled in zip(answers, done, strict=True) if settled
            ]

    def test_an_owner_and_a_resolver_do_not_both_complete(self, kit: Kit) -> None:
        """The first call decides the response, and the other one gets an error."""
        for _ in range(ROUNDS):
            held, token = kit.stood("quarantined")
            finish = partial(kit.completes, held.key, token)

            finished, settled = at_once(finish, partial(kit.resolve, held, OTHER_PAYLOAD))
            assert finished is not settled
            assert (PAYLOAD if finished else OTHER_PAYLOAD) == kit.seen(held.key).record.payload
