"""Contract of what a store keeps beside its records: activity, observations, and the audit trail."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

import pytest

from flask_idempotency.engine.activity import HOUR, KEPT_SECONDS, MINUTE, merged
from flask_idempotency.engine.audit import AUDIT_KEPT_SECONDS, LONGEST_ACTOR, LONGEST_REASON, AuditEntry
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey
from flask_idempotency.engine.observations import Ending, Observed, Sighting
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    CapableStore,
    Contract,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
    near,
)
from flask_idempotency.testing.doubles import FrozenClock

SOME: Mapping[str, Mapping[str, int]] = {"pay": {"new": 3, "completed": 2, "t:new:7": 2}, "refund": {"replayed": 1}}


def an_owner() -> bytes:
    """An application that no other test uses."""
    return secrets.token_bytes(OWNER_BYTES)


def counted(store: CapableStore, owner: bytes, *, length: int = MINUTE, seconds: float = HOUR) -> object:
    """Everything that was counted in a span, in all buckets together."""
    return merged(bucket.counts for bucket in store.activity.read(owner, length=length, seconds=seconds).buckets)


class ActivityContract:
    """The contract of `flask_idempotency.engine.activity.ActivityLog`. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        # The first second of an hour.
        return FrozenClock(1_800_000_000.0)

    def test_counts_add_up_by_minute_and_by_hour(self, store: CapableStore, clock: FrozenClock) -> None:
        """Of all processes, by endpoint and by counter."""
        owner = an_owner()
        for counts in (SOME, {"pay": {"new": 1, "conflict": 4}}, {"ship": {"new": 1}}):
            store.activity.add(owner, counts, token=a_token())
        total = {
            "pay": {"new": 4, "completed": 2, "t:new:7": 2, "conflict": 4},
            "refund": {"replayed": 1},
            "ship": {"new": 1},
        }

        for length in (MINUTE, HOUR):
            page = store.activity.read(owner, length=length, seconds=1)
            assert near(clock.now) == page.now
            assert [(int(clock.now), total)] == [(bucket.start, bucket.counts) for bucket in page.buckets]

    def test_an_application_without_counts_has_no_bucket(self, store: CapableStore, clock: FrozenClock) -> None:
        """The page still tells the time."""
        page = store.activity.read(an_owner(), length=MINUTE, seconds=86400)

        assert (near(clock.now), []) == (page.now, list(page.buckets))

    def test_an_empty_call_counts_nothing(self, store: CapableStore) -> None:
        owner = an_owner()
        store.activity.add(owner, {}, token=a_token())

        assert list(store.activity.read(owner, length=MINUTE, seconds=HOUR).buckets) == []

    def test_each_minute_and_each_hour_has_its_bucket(self, store: CapableStore, clock: FrozenClock) -> None:
        """The oldest first. Their starts are whole minutes and hours, and empty ones are left out."""
        owner, began = an_owner(), int(clock.now)
        for wait in (59.5, 0.5, 3540.0):
            store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())
            clock.advance(wait)
        store.activity.add(owner, {"pay": {"new": 5}}, token=a_token())
        starts = {
            length: [
                (bucket.start - began, bucket.counts["pay"]["new"])
                for bucket in store.activity.read(owner, length=length, seconds=2 * HOUR).buckets
            ]
            for length in (MINUTE, HOUR)
        }

        assert starts == {MINUTE: [(0, 2), (60, 1), (3600, 5)], HOUR: [(0, 3), (3600, 5)]}

    def test_the_same_call_again_adds_nothing(self, store: CapableStore, clock: FrozenClock) -> None:
        """A client repeats it if the reply was lost, also when the next minute or hour has begun."""
        owner, token = an_owner(), a_token()
        clock.advance(HOUR - 1)
        store.activity.add(owner, SOME, token=token)
        for wait in (0, 0.5, 10):
            clock.advance(wait)
            store.activity.add(owner, SOME, token=token)

        assert counted(store, owner) == SOME
        assert counted(store, owner, length=HOUR) == SOME

    def test_applications_are_counted_apart(self, store: CapableStore) -> None:
        owner, other = an_owner(), an_owner()
        store.activity.add(owner, SOME, token=a_token())
        store.activity.add(other, {"pay": {"new": 7}}, token=a_token())

        assert (counted(store, owner), counted(store, other)) == (SOME, {"pay": {"new": 7}})

    @for_each("length", (MINUTE, HOUR))
    def test_a_span_ends_with_the_buckets_that_reach_into_it(
        self, store: CapableStore, clock: FrozenClock, length: int
    ) -> None:
        """A bucket that ended exactly so long ago is out."""
        clock.advance(-clock.now % HOUR)
        owner = an_owner()
        store.activity.add(owner, SOME, token=a_token())
        clock.advance(length + 300)

        assert counted(store, owner, length=length, seconds=300) == {}
        assert counted(store, owner, length=length, seconds=300.5) == SOME

    @for_each("length", (MINUTE, HOUR))
    def test_a_bucket_is_kept_for_its_time(self, store: CapableStore, clock: FrozenClock, length: int) -> None:
        """Then it is gone, whether it is removed already or not."""
        clock.advance(-clock.now % HOUR)
        owner, kept = an_owner(), KEPT_SECONDS[length]
        store.activity.add(owner, SOME, token=a_token())
        clock.advance(length + kept - 1)
        assert counted(store, owner, length=length, seconds=10 * kept) == SOME
        clock.advance(1)
        store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())

        assert counted(store, owner, length=length, seconds=10 * kept) == {"pay": {"new": 1}}

    @for_each(
        "endpoint",
        ("", "inbox:ledger", "größe ✓", 'a "quoted" \\ one', "{}:,", "a\nb\0c", "%s :now 'x'", "x" * 5000),
        ids=("empty", "inbox", "unicode", "quotes", "json", "control", "sql", "long"),
    )
    def test_an_endpoint_may_have_any_name(self, store: CapableStore, endpoint: str) -> None:
        owner = an_owner()
        for _ in range(2):
            store.activity.add(
                owner, {endpoint: {"would:replayed@cookie": 2**40}, "other": {"new": 1}}, token=a_token()
            )

        expected = {endpoint: {"would:replayed@cookie": 2**41}, "other": {"new": 2}}
        assert expected == counted(store, owner)
        assert expected == counted(store, owner, length=HOUR)

    def test_a_clock_that_is_set_back_loses_no_count(self, store: CapableStore, clock: FrozenClock) -> None:
        """They stand in the minute that the clock shows."""
        owner = an_owner()
        clock.advance(600)
        store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())
        clock.advance(-300)
        store.activity.add(owner, {"pay": {"new": 2}}, token=a_token())
        clock.advance(300)

        assert counted(store, owner) == {"pay": {"new": 3}}

    def test_many_processes_lose_no_count(self, store: CapableStore) -> None:
        """They add to the same minute at the same time: to the same counters, and each to some that are new."""
        owner = an_owner()

        def add(number: int) -> None:
            for turn in range(ROUNDS):
                counts = {"pay": {"new": 1, f"t:new:{number}": 1}, f"only-{number}-{turn}": {"new": 2}}
                store.activity.add(owner, counts, token=a_token())

        at_once(*[lambda number=number: add(number) for number in range(THREADS)])
        expected: dict[str, dict[str, int]] = {
            f"only-{number}-{turn}": {"new": 2} for number in range(THREADS) for turn in range(ROUNDS)
        }
        expected["pay"] = {"new": THREADS * ROUNDS} | {f"t:new:{number}": ROUNDS for number in range(THREADS)}

        assert expected == counted(store, owner)
        assert expected == counted(store, owner, length=HOUR)

    def test_of_many_equal_calls_one_adds(self, store: CapableStore) -> None:
        """A first try that arrives late meets its own repetition."""
        for _ in range(ROUNDS):
            owner, token = an_owner(), a_token()
            at_once(
                *[lambda owner=owner, token=token: store.activity.add(owner, SOME, token=token) for _ in range(THREADS)]
            )

            assert counted(store, owner) == SOME


def seen_by(
    store: CapableStore,
    key: StorageKey,
    token: bytes,
    *,
    fingerprint: bytes = FINGERPRINT,
    hold_lapsed: bool = False,
) -> Observed:
    """What a request with this token finds."""
    return store.observations.observe(
        key, token=token, fingerprint=fingerprint, lease=LEASE, keep=KEEP, hold_lapsed=hold_lapsed
    )


def found(sighting: Sighting, ago: float = 0.0) -> Observed:
    return Observed(sighting, near(ago))


class ObservationsContract(Contract):
    """The contract of `flask_idempotency.engine.observations.Observations`. Override `store`."""

    def test_the_second_request_conflicts_while_the_first_runs(self, store: CapableStore, clock: FrozenClock) -> None:
        """And so does a third. Each learns how long ago the first one began."""
        key = a_key()
        assert found(Sighting.NEW) == seen_by(store, key, a_token())
        clock.advance(2.5)

        assert [found(Sighting.CONFLICT, 2.5)] * 2 == [seen_by(store, key, a_token()) for _ in range(2)]

    @for_each(("ending", "then"), ((Ending.KEPT, Sighting.REPLAY), (Ending.QUARANTINED, Sighting.UNKNOWN)))
    def test_an_ending_is_what_later_requests_find(
        self, store: CapableStore, clock: FrozenClock, ending: Ending, then: Sighting
    ) -> None:
        """For `keep` seconds from the end. Then the key is new."""
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        clock.advance(5)
        store.observations.end(key, token, ending, keep=KEEP)
        clock.advance(KEEP - 0.125)
        assert [found(then, KEEP + 4.875)] * 2 == [seen_by(store, key, a_token()) for _ in range(2)]
        clock.advance(0.125)

        assert found(Sighting.NEW) == seen_by(store, key, a_token())

    def test_a_released_key_is_new(self, store: CapableStore) -> None:
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        store.observations.end(key, token, Ending.RELEASED, keep=KEEP)

        assert found(Sighting.NEW) == seen_by(store, key, a_token(), fingerprint=OTHER_FINGERPRINT)

    @for_each("ending", (None, Ending.KEPT, Ending.QUARANTINED, "lapsed"))
    def test_another_request_mismatches_in_any_state(
        self, store: CapableStore, clock: FrozenClock, ending: Ending | str | None
    ) -> None:
        """It changes nothing, so the watched request is found as before."""
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        if isinstance(ending, Ending):
            store.observations.end(key, token, ending, keep=KEEP)
        clock.advance(LEASE + 1 if ending == "lapsed" else 1)
        for hold in (False, True):
            other = seen_by(store, key, a_token(), fingerprint=OTHER_FINGERPRINT, hold_lapsed=hold)
            assert Sighting.MISMATCH is other.sighting

        expected = {
            None: Sighting.CONFLICT,
            Ending.KEPT: Sighting.REPLAY,
            Ending.QUARANTINED: Sighting.UNKNOWN,
            "lapsed": Sighting.TAKEN_OVER,
        }
        assert expected[ending] is seen_by(store, key, a_token()).sighting

    def test_the_same_request_again_finds_what_it_found(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its reply may have been lost. The one that took over, too."""
        key, token, heir = a_key(), a_token(), a_token()
        for _ in range(2):
            assert found(Sighting.NEW) == seen_by(store, key, token)
            clock.advance(1)
        clock.advance(LEASE)
        for _ in range(2):
            assert found(Sighting.TAKEN_OVER, LEASE + 2) == seen_by(store, key, heir)
            clock.advance(1)

    def test_a_lapsed_lease_is_taken_over(self, store: CapableStore, clock: FrozenClock) -> None:
        """When it ends, and by one request. The one before may write no more."""
        key, token, heir = a_key(), a_token(), a_token()
        seen_by(store, key, token)
        clock.advance(LEASE - 0.125)
        assert Sighting.CONFLICT is seen_by(store, key, heir).sighting
        clock.advance(0.125)
        assert found(Sighting.TAKEN_OVER, LEASE) == seen_by(store, key, heir)
        for ending in Ending:
            store.observations.end(key, token, ending, keep=KEEP)

        assert found(Sighting.CONFLICT, LEASE) == seen_by(store, key, a_token())
        store.observations.end(key, heir, Ending.KEPT, keep=KEEP)
        assert found(Sighting.REPLAY, LEASE) == seen_by(store, key, a_token())

    def test_a_lapsed_lease_may_leave_the_outcome_unknown(self, store: CapableStore, clock: FrozenClock) -> None:
        """For `keep` seconds, whatever later requests would do. Its own end comes too late."""
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        clock.advance(LEASE)
        assert found(Sighting.UNKNOWN, LEASE) == seen_by(store, key, a_token(), hold_lapsed=True)
        store.observations.end(key, token, Ending.KEPT, keep=KEEP)
        clock.advance(KEEP - 0.125)
        assert Sighting.UNKNOWN is seen_by(store, key, a_token()).sighting
        clock.advance(0.125)

        assert found(Sighting.NEW) == seen_by(store, key, a_token())

    def test_a_late_end_counts_if_no_request_took_over(self, store: CapableStore, clock: FrozenClock) -> None:
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        clock.advance(LEASE + 5)
        store.observations.end(key, token, Ending.KEPT, keep=KEEP)

        assert found(Sighting.REPLAY, LEASE + 5) == seen_by(store, key, a_token())

    def test_a_renewal_extends_the_lease_and_never_shortens_it(self, store: CapableStore, clock: FrozenClock) -> None:
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        clock.advance(LEASE - 1)
        store.observations.renew(key, token, lease=LEASE)
        store.observations.renew(key, token, lease=1)
        clock.advance(LEASE - 0.125)
        assert Sighting.CONFLICT is seen_by(store, key, a_token()).sighting
        clock.advance(0.125)

        assert Sighting.TAKEN_OVER is seen_by(store, key, a_token()).sighting

    def test_a_renewal_by_another_request_is_harmless(self, store: CapableStore, clock: FrozenClock) -> None:
        """So is one after the end, and one of a key that no request has used."""
        key, ended, token = a_key(), a_key(), a_token()
        seen_by(store, key, a_token())
        seen_by(store, ended, token)
        store.observations.end(ended, token, Ending.KEPT, keep=1)
        for renewed in (key, ended, a_key()):
            store.observations.renew(renewed, token, lease=KEEP)
        clock.advance(LEASE)

        assert Sighting.TAKEN_OVER is seen_by(store, key, a_token()).sighting
        assert Sighting.NEW is seen_by(store, ended, a_token()).sighting

    def test_the_first_end_counts(self, store: CapableStore) -> None:
        """A repeated one is harmless, and so is one of a key that no request has used."""
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        for ending in (Ending.KEPT, Ending.KEPT, Ending.QUARANTINED, Ending.RELEASED):
            store.observations.end(key, token, ending, keep=KEEP)
            store.observations.end(a_key(), token, ending, keep=KEEP)

        assert Sighting.REPLAY is seen_by(store, key, a_token()).sighting

    def test_a_request_that_never_ends_is_forgotten(self, store: CapableStore, clock: FrozenClock) -> None:
        """After its lease and `keep` seconds. Then it can neither renew nor end."""
        key, token = a_key(), a_token()
        seen_by(store, key, token)
        store.observations.renew(key, token, lease=2 * LEASE)
        clock.advance(2 * LEASE + KEEP - 0.125)
        assert Sighting.MISMATCH is seen_by(store, key, a_token(), fingerprint=OTHER_FINGERPRINT).sighting
        clock.advance(0.125)
        store.observations.renew(key, token, lease=LEASE)
        store.observations.end(key, token, Ending.KEPT, keep=KEEP)

        assert found(Sighting.NEW) == seen_by(store, key, a_token(), fingerprint=OTHER_FINGERPRINT)

    def test_a_clock_that_is_set_back_makes_no_negative_time(self, store: CapableStore, clock: FrozenClock) -> None:
        key = a_key()
        seen_by(store, key, a_token())
        clock.advance(-10)

        assert found(Sighting.CONFLICT) == seen_by(store, key, a_token())

    def test_keys_are_apart_also_of_one_tenant(self, store: CapableStore) -> None:
        key = a_key()
        seen_by(store, key, a_token())

        assert found(Sighting.NEW) == seen_by(store, a_key(tid=key.tid), a_token())

    def test_a_claim_never_finds_an_observation(self, store: CapableStore) -> None:
        """Nor an observation a record."""
        key, claimed = a_key(), a_key()
        seen_by(store, key, a_token())
        assert store.read(key) is None
        granted(store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE))
        granted(store.claim(a_request(claimed), token=a_token(), lease=LEASE))

        assert Sighting.CONFLICT is seen_by(store, key, a_token()).sighting
        assert found(Sighting.NEW) == seen_by(store, claimed, a_token(), fingerprint=OTHER_FINGERPRINT)

    def test_of_many_one_is_new(self, store: CapableStore) -> None:
        """All others conflict with it."""
        for _ in range(ROUNDS):
            key = a_key()
            sightings = at_once(
                *[lambda key=key: seen_by(store, key, a_token()).sighting.value for _ in range(THREADS)]
            )

            assert sorted(["new", *["conflict"] * (THREADS - 1)]) == sorted(sightings)

    def test_of_many_one_takes_over(self, store: CapableStore, clock: FrozenClock) -> None:
        for _ in range(ROUNDS):
            key = a_key()
            seen_by(store, key, a_token())
            clock.advance(LEASE)
            sightings = at_once(
                *[lambda key=key: seen_by(store, key, a_token()).sighting.value for _ in range(THREADS)]
            )

            assert sorted(["taken-over", *["conflict"] * (THREADS - 1)]) == sorted(sightings)


def an_actor() -> str:
    """An operator that no other test uses."""
    return secrets.token_hex(8)


SETTLED = AuditEntry("completed", "quarantined", "ann", "the bank confirms it")


class AuditTrailContract(Contract):
    """The contract of `flask_idempotency.engine.audit.AuditTrail`. Override `store`."""

    def test_entries_are_returned_in_order_and_with_their_times(self, store: CapableStore, clock: FrozenClock) -> None:
        """The store sets the time, whatever the caller gave."""
        key, entries = a_key(), []
        for number in range(4):
            entry = replace(SETTLED, reason=f"reason {number}", certain=number != 2, at=5.0)
            entry = replace(entry, step="charge" if number == 1 else "", forced=number == 3)
            store.audit.append(key, entry, token=a_token())
            entries.append(replace(entry, at=near(clock.now)))
            clock.advance(1.5)

        assert entries == list(store.audit.entries(key))
        assert entries[-2:] == list(store.audit.entries(key, limit=2))

    def test_a_record_without_changes_has_no_entry(self, store: CapableStore) -> None:
        """Also if another record of the tenant has."""
        key = a_key()
        store.audit.append(key, SETTLED, token=a_token())

        assert list(store.audit.entries(a_key(tid=key.tid))) == []

    def test_the_same_call_again_adds_nothing(self, store: CapableStore, clock: FrozenClock) -> None:
        key, token, actor = a_key(), a_token(), an_actor()
        for _ in range(3):
            store.audit.append(key, replace(SETTLED, actor=actor), token=token)
            clock.advance(1)

        assert ([near(clock.now - 3)], 1) == (
            [entry.at for entry in store.audit.entries(key)],
            store.audit.count(actor, seconds=60),
        )

    @for_each(
        "text",
        ("", "größer ✓ \\ \" ' % :now", "a\nb\0c\ud800", '["x"]'),
        ids=("empty", "odd", "control", "json"),
    )
    def test_texts_are_returned_unchanged(self, store: CapableStore, text: str) -> None:
        key, entry = a_key(), replace(SETTLED, verb="never-happened", actor=text, reason=text, certain=False)
        store.audit.append(key, entry, token=a_token())

        (returned,) = store.audit.entries(key)
        assert entry == replace(returned, at=0.0)

    def test_a_text_within_its_limit_is_whole(self, store: CapableStore) -> None:
        """A longer one may be cut at the limit, and never fails."""
        key, actor = a_key(), an_actor() + "é" * LONGEST_ACTOR
        for extra in (0, 3):
            entry = replace(SETTLED, actor=actor[: LONGEST_ACTOR + extra], reason="é" * (LONGEST_REASON + extra))
            store.audit.append(key, entry, token=a_token())

        for entry in store.audit.entries(key):
            assert (actor[:LONGEST_ACTOR], "é" * LONGEST_REASON) == (
                entry.actor[:LONGEST_ACTOR],
                entry.reason[:LONGEST_REASON],
            )
        assert store.audit.count(actor[: LONGEST_ACTOR + 3], seconds=60) == 2

    def test_an_entry_is_kept_for_a_year_and_more(self, store: CapableStore, clock: FrozenClock) -> None:
        """Then it is gone, also while later ones stay."""
        key = a_key()
        store.audit.append(key, SETTLED, token=a_token())
        clock.advance(AUDIT_KEPT_SECONDS - 1)
        later = replace(SETTLED, reason="again")
        store.audit.append(key, later, token=a_token())
        assert [entry.reason for entry in store.audit.entries(key)] == ["the bank confirms it", "again"]
        clock.advance(1)

        assert [entry.reason for entry in store.audit.entries(key)] == ["again"]

    def test_the_changes_of_an_actor_are_counted(self, store: CapableStore, clock: FrozenClock) -> None:
        """In a span until now, of all records, and not those of others."""
        actor = an_actor()
        for _ in range(3):
            store.audit.append(a_key(), replace(SETTLED, actor=actor), token=a_token())
            store.audit.append(a_key(), replace(SETTLED, actor=an_actor()), token=a_token())
            clock.advance(10)

        assert [store.audit.count(actor, seconds=span) for span in (10, 20, 20.5, 40, 86400)] == [0, 1, 2, 3, 3]
        clock.advance(86400)
        assert (store.audit.count(actor, seconds=86400), store.audit.count(an_actor(), seconds=86400)) == (0, 0)

    def test_a_tenant_is_forgotten(self, store: CapableStore) -> None:
        """All its records, and those of no other tenant. It is harmless again, and if there were none."""
        key, other = a_key(), a_key()
        keys = [key, a_key(tid=key.tid), a_key(tid=key.tid)]
        for each in (*keys, other):
            for _ in range(2):
                store.audit.append(each, SETTLED, token=a_token())
        for _ in range(2):
            store.audit.forget(key.tid)

        assert [len(store.audit.entries(each)) for each in (*keys, other)] == [0, 0, 0, 2]
        store.audit.append(key, SETTLED, token=a_token())
        assert len(store.audit.entries(key)) == 1

    def test_many_actors_lose_no_entry(self, store: CapableStore) -> None:
        """Of one record, at the same time."""
        key, actor = a_key(), an_actor()

        def append(number: int) -> None:
            for turn in range(ROUNDS):
                store.audit.append(key, replace(SETTLED, actor=actor, reason=f"{number} {turn}"), token=a_token())

        at_once(*[lambda number=number: append(number) for number in range(THREADS)])
        expected = {f"{number} {turn}" for number in range(THREADS) for turn in range(ROUNDS)}

        entries = store.audit.entries(key, limit=1000)
        assert (len(expected), expected) == (len(entries), {entry.reason for entry in entries})
        assert len(expected) == store.audit.count(actor, seconds=60)
