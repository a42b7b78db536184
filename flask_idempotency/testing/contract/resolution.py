"""Contract of resolving: an operator or a resolver completes or releases the record of a vanished worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, State
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
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
    lost,
    near,
    noticed,
    seen,
    stand,
    stood,
)
from flask_idempotency.testing.doubles import FrozenClock

# An operator or a resolver lets a key run again.


class ForceReleasing:
    """`force_release`: the key is as unused, except for its fence."""

    @for_each("standing", STANDINGS)
    def test_a_key_is_freed_whatever_state_it_is_in(
        self, store: CapableStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """The next claim gets it, from any request, with a higher fence."""
        seen, _ = stood(store, clock, standing)

        assert store.recovery.force_release(seen)
        assert store.read(seen.key) is None
        another = a_request(seen.key, fingerprint=OTHER_FINGERPRINT)
        grant = granted(store.claim(another, token=a_token(), lease=LEASE))
        assert (grant.attempt, grant.fence > seen.record.fence) == (1, True)

    def test_a_worker_that_passed_its_point_since_keeps_its_key(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its lease may be over. What it does from there on may have an effect, so the record has changed."""
        seen, late = stood(store, clock, "lapsed, takeover")
        store.mark_point_of_no_return(seen.key, late)

        assert not store.recovery.force_release(seen)
        assert found(store, seen.key).token == late

    def test_a_condemned_key_is_freed(self, store: CapableStore, clock: FrozenClock) -> None:
        """No key opens its response. The operator who releases it must know that the request completed."""
        damaged, _ = condemned(store, clock)

        assert store.recovery.force_release(damaged)
        assert store.read(damaged.key) is None
        granted(store.claim(a_request(damaged.key), token=a_token(), lease=LEASE))

    @for_each("standing", STANDINGS)
    def test_its_owner_has_lost_it(self, store: CapableStore, clock: FrozenClock, standing: Standing) -> None:
        """It can neither complete nor keep what is not its own any more; and what comes after it stays untouched."""
        seen, late = stood(store, clock, standing)
        assert store.recovery.force_release(seen)
        writes: tuple[Callable[[], object], ...] = (
            lambda: store.complete(seen.key, late, PAYLOAD, keep=KEEP),
            lambda: store.renew(seen.key, late, lease=LEASE),
            lambda: store.mark_point_of_no_return(seen.key, late),
            lambda: store.quarantine(seen.key, late, "who knows"),
        )
        for write in writes:
            assert lost(write)
        assert store.read(seen.key) is None

        stand(store, clock, seen.key, "in flight")
        before = found(store, seen.key)
        for write in (*writes, lambda: store.release(seen.key, late)):
            assert lost(write)
        assert before == found(store, seen.key)

    def test_what_is_free_is_not_freed(self, store: CapableStore, clock: FrozenClock) -> None:
        """Again, after its response has expired, and if it never existed."""
        freed, _ = stood(store, clock, "quarantined")
        assert store.recovery.force_release(freed)
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP)

        for each in (freed, answered, SeenRecord(a_key(), freed.record)):
            assert not store.recovery.force_release(each)
            assert store.read(each.key) is None

    @for_each("event", ("renewed", "taken over", "completed", "held", "begun again"))
    def test_what_does_not_stand_as_it_was_seen_is_not_freed(
        self, store: CapableStore, clock: FrozenClock, event: str
    ) -> None:
        """The operator decided before the response was stored."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
        clock.advance(LEASE)
        lapsed = SeenRecord(key, found(store, key))
        events: dict[str, Callable[[], object]] = {
            "renewed": lambda: store.renew(key, token, lease=LEASE),
            "taken over": lambda: granted(store.claim(a_request(key), token=a_token(), lease=LEASE)),
            "completed": lambda: store.complete(key, token, PAYLOAD, keep=KEEP),
            "held": lambda: store.quarantine(key, token, "view-crashed"),
            "begun again": lambda: begin_anew(store, key, token),
        }
        events[event]()
        before = found(store, key)

        assert not store.recovery.force_release(lapsed)
        assert before == found(store, key)

    def test_another_claim_of_the_same_moment_is_not_freed(self, store: CapableStore, clock: FrozenClock) -> None:
        """Both leases have the same deadline, so only the token tells them apart."""
        first, token = stood(store, clock, "in flight")
        begin_anew(store, first.key, token)
        before = found(store, first.key)
        assert first.record.deadline == before.deadline

        assert not store.recovery.force_release(first)
        assert before == found(store, first.key)

    def test_a_later_response_is_not_released(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its key has run again since the operator saw the first claim."""
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP)
        stand(store, clock, answered.key, "completed")
        before = found(store, answered.key)

        assert not store.recovery.force_release(answered)
        assert before == found(store, answered.key)

    def test_a_key_is_freed_once(self, store: CapableStore, clock: FrozenClock) -> None:
        """One of many calls does it. No call releases a later claim."""
        for _ in range(ROUNDS):
            held, _ = stood(store, clock, "quarantined")

            done = at_once(*[lambda held=held: store.recovery.force_release(held)] * THREADS)
            assert [each for each in done if each] == [True]

    def test_an_answer_and_who_frees_its_key_do_not_both_win(self, store: CapableStore, clock: FrozenClock) -> None:
        """Either the response is stored and stays, or the key is free and its owner gets `LeaseLost`."""
        for _ in range(ROUNDS):
            flying, token = stood(store, clock, "in flight")

            def finish(key: StorageKey = flying.key, token: bytes = token) -> bool:
                try:
                    store.complete(key, token, PAYLOAD, keep=KEEP)
                except LeaseLost:
                    return False
                return True

            def free(flying: SeenRecord = flying) -> bool:
                return store.recovery.force_release(flying)

            finished, freed = at_once(finish, free)
            assert (True, finished) == (finished is not freed, store.read(flying.key) is not None)


class Resolving:
    """`resolve`: from now on this is the response, and the owner gets `LeaseLost`."""

    @for_each("how", ("held", "lapsed", "condemned"))
    def test_what_is_quarantined_is_completed(self, store: CapableStore, clock: FrozenClock, how: str) -> None:
        """Under the fresh token, with the fence and the story it had; and its life begins now."""
        match how:
            case "held":
                quarantined, _ = stood(store, clock, "quarantined")
            case "lapsed":
                quarantined, _ = noticed(store, clock)
            case _:
                quarantined, _ = condemned(store, clock)
        clock.advance(400 * 86400)
        token = a_token()

        assert store.recovery.resolve(quarantined, token=token, payload=OTHER_PAYLOAD, keep=KEEP)
        record = found(store, quarantined.key)
        assert (near(clock.now), near(clock.now + KEEP)) == (record.completed_at, record.deadline)
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
        assert record == store.claim(a_request(quarantined.key), token=a_token(), lease=LEASE)

    def test_an_answer_by_another_ends_as_any_other(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its key is free then."""
        held, _ = stood(store, clock, "quarantined")
        assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        clock.advance(KEEP - 0.125)
        assert isinstance(store.claim(a_request(held.key), token=a_token(), lease=LEASE), Record)
        clock.advance(0.125)

        assert granted(store.claim(a_request(held.key), token=a_token(), lease=LEASE)).fence > held.record.fence

    @for_each("verb", ("complete", "renew", "release", "quarantine", "mark_point_of_no_return"))
    def test_the_owner_has_lost_it(self, store: CapableStore, clock: FrozenClock, verb: str) -> None:
        """It must not send another response than all retries get, and changes nothing."""
        held, token = stood(store, clock, "quarantined")
        assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        before = found(store, held.key)
        writes: dict[str, Callable[[], object]] = {
            "complete": lambda: store.complete(held.key, token, OTHER_PAYLOAD, keep=2 * KEEP),
            "renew": lambda: store.renew(held.key, token, lease=LEASE),
            "release": lambda: store.release(held.key, token),
            "quarantine": lambda: store.quarantine(held.key, token, "who knows"),
            "mark_point_of_no_return": lambda: store.mark_point_of_no_return(held.key, token),
        }
        assert lost(lambda: writes[verb]())

        assert before == found(store, held.key)

    def test_a_repeated_settlement_is_done(self, store: CapableStore, clock: FrozenClock) -> None:
        """With the same token, after a lost reply. What was stored first stays, and lives no longer."""
        held, _ = stood(store, clock, "quarantined")
        token = a_token()
        assert store.recovery.resolve(held, token=token, payload=PAYLOAD, keep=KEEP)
        before = found(store, held.key)

        assert store.recovery.resolve(held, token=token, payload=OTHER_PAYLOAD, keep=10 * KEEP)
        assert before == found(store, held.key)

    def test_a_second_settlement_is_refused(self, store: CapableStore, clock: FrozenClock) -> None:
        """Another token belongs to another resolver: two resolvers may have different results."""
        held, _ = stood(store, clock, "quarantined")
        assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        before = found(store, held.key)

        for each in (held, SeenRecord(held.key, before)):
            assert not store.recovery.resolve(each, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
        assert before == found(store, held.key)

    @for_each("standing", ("in flight", "completed", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_quarantined_is_not_settled(
        self, store: CapableStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """Its owner may be running, or a retry will take over, or the owner has completed it."""
        other, _ = stood(store, clock, standing)

        assert not store.recovery.resolve(other, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
        assert other.record == found(store, other.key)

    @for_each("event", ("completed", "condemned", "released", "begun again", "lapsed again"))
    def test_what_does_not_stand_as_it_was_seen_is_not_settled(
        self, store: CapableStore, clock: FrozenClock, event: str
    ) -> None:
        """Its owner was faster, or the record is of another claim: the seen record no longer exists."""
        held, token = stood(store, clock, "quarantined")
        if event in ("completed", "condemned"):
            store.complete(held.key, token, PAYLOAD, keep=KEEP)
            if event == "condemned":
                store.mark_corrupt(held.key, PAYLOAD)
        else:
            store.release(held.key, token)
            if event == "begun again":
                stand(store, clock, held.key, "in flight")
            if event == "lapsed again":
                stand(store, clock, held.key, "quarantined")
        before = store.read(held.key)

        assert not store.recovery.resolve(held, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
        assert before == store.read(held.key)

    def test_what_was_seen_in_flight_is_not_settled(self, store: CapableStore, clock: FrozenClock) -> None:
        """Even if it is quarantined by now, because the resolver has not seen that."""
        in_flight, token = stood(store, clock, "in flight")
        store.quarantine(in_flight.key, token, "view-crashed")
        before = found(store, in_flight.key)

        assert not store.recovery.resolve(in_flight, token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert before == found(store, in_flight.key)

    def test_an_expired_response_is_not_resolved(self, store: CapableStore, clock: FrozenClock) -> None:
        """The record is gone by then, and the call changes no record."""
        held, token = stood(store, clock, "quarantined")
        store.complete(held.key, token, PAYLOAD, keep=KEEP)
        clock.advance(KEEP)

        assert not store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert store.read(held.key) is None

    @for_each("keep", (0.0, -1.0, math.inf, math.nan))
    def test_an_answer_by_another_without_an_end_is_refused(
        self, store: CapableStore, clock: FrozenClock, keep: float
    ) -> None:
        """The store keeps it as long as its owner's response."""
        held, _ = stood(store, clock, "quarantined")
        with pytest.raises(ValueError, match="duration"):
            store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=keep)

        assert held.record == found(store, held.key)

    def test_of_many_who_settle_one_does(self, store: CapableStore, clock: FrozenClock) -> None:
        """Each resolver has another response, and all retries get the same one."""
        for _ in range(ROUNDS):
            held, _ = stood(store, clock, "quarantined")
            answers = [replace(PAYLOAD, data=b"%d" % number) for number in range(THREADS)]
            done = at_once(
                *[
                    lambda held=held, answer=answer: store.recovery.resolve(
                        held, token=a_token(), payload=answer, keep=KEEP
                    )
                    for answer in answers
                ]
            )

            assert [found(store, held.key).payload] == [
                answer for answer, settled in zip(answers, done, strict=True) if settled
            ]

    def test_an_owner_and_a_resolver_do_not_both_complete(self, store: CapableStore, clock: FrozenClock) -> None:
        """The first call decides the response, and the other one gets an error."""
        for _ in range(ROUNDS):
            held, token = stood(store, clock, "quarantined")

            def finish(held: SeenRecord = held, token: bytes = token) -> bool:
                try:
                    store.complete(held.key, token, PAYLOAD, keep=KEEP)
                except LeaseLost:
                    return False
                return True

            def settle(held: SeenRecord = held) -> bool:
                return store.recovery.resolve(held, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)

            finished, settled = at_once(finish, settle)
            assert finished is not settled
            assert (PAYLOAD if finished else OTHER_PAYLOAD) == seen(store, held.key).record.payload
