"""Contract of what a store keeps beside its records: activity, observations, and the audit trail."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

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
    Kit,
    a_token,
    for_each,
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


class ActivityContract(Contract):
    """The contract of `flask_idempotency.engine.activity.ActivityLog`. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        # The first second of an hour.
        return FrozenClock(1_800_000_000.0)

    def test_counts_add_up_by_minute_and_by_hour(self, kit: Kit) -> None:
        """Of all processes, by endpoint and by counter."""
        owner = an_owner()
        for counts in (SOME, {"pay": {"new": 1, "conflict": 4}}, {"ship": {"new": 1}}):
            kit.store.activity.add(owner, counts, token=a_token())
        total = {
            "pay": {"new": 4, "completed": 2, "t:new:7": 2, "conflict": 4},
            "refund": {"replayed": 1},
            "ship": {"new": 1},
        }

        for length in (MINUTE, HOUR):
            page = kit.store.activity.read(owner, length=length, seconds=1)
            assert near(kit.now) == page.now
            assert [(int(kit.now), total)] == [(bucket.start, bucket.counts) for bucket in page.buckets]

    def test_an_application_without_counts_has_no_bucket(self, kit: Kit) -> None:
        """An empty call counts nothing. The page still tells the time."""
        owner = an_owner()
        kit.store.activity.add(owner, {}, token=a_token())
        page = kit.store.activity.read(owner, length=MINUTE, seconds=86400)

        assert (near(kit.now), []) == (page.now, list(page.buckets))

    def test_each_minute_and_each_hour_has_its_bucket(self, kit: Kit) -> None:
        """The oldest first. Their starts are whole minutes and hours, and empty ones are left out."""
        owner, began = an_owner(), int(kit.now)
        for wait in (59.5, 0.5, 3540.0):
            kit.store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())
            kit.advance(wait)
        kit.store.activity.add(owner, {"pay": {"new": 5}}, token=a_token())
        starts = {
            length: [
                (bucket.start - began, bucket.counts["pay"]["new"])
                for bucket in kit.store.activity.read(owner, length=length, seconds=2 * HOUR).buckets
            ]
            for length in (MINUTE, HOUR)
        }

        assert starts == {MINUTE: [(0, 2), (60, 1), (3600, 5)], HOUR: [(0, 3), (3600, 5)]}

    def test_the_same_call_again_adds_nothing(self, kit: Kit) -> None:
        """A client repeats it if the reply was lost, also when the next minute or hour has begun."""
        owner, token = an_owner(), a_token()
        kit.advance(HOUR - 1)
        kit.store.activity.add(owner, SOME, token=token)
        for wait in (0, 0.5, 10):
            kit.advance(wait)
            kit.store.activity.add(owner, SOME, token=token)

        assert counted(kit.store, owner) == SOME
        assert counted(kit.store, owner, length=HOUR) == SOME

    def test_applications_are_counted_apart(self, kit: Kit) -> None:
        owner, other = an_owner(), an_owner()
        kit.store.activity.add(owner, SOME, token=a_token())
        kit.store.activity.add(other, {"pay": {"new": 7}}, token=a_token())

        assert (counted(kit.store, owner), counted(kit.store, other)) == (SOME, {"pay": {"new": 7}})

    @for_each("length", (MINUTE, HOUR))
    def test_a_span_ends_with_the_buckets_that_reach_into_it(self, kit: Kit, length: int) -> None:
        """A bucket that ended exactly so long ago is out."""
        kit.advance(-kit.now % HOUR)
        owner = an_owner()
        kit.store.activity.add(owner, SOME, token=a_token())
        kit.advance(length + 300)

        assert counted(kit.store, owner, length=length, seconds=300) == {}
        assert counted(kit.store, owner, length=length, seconds=300.5) == SOME

    @for_each("length", (MINUTE, HOUR))
    def test_a_bucket_is_kept_for_its_time(self, kit: Kit, length: int) -> None:
        """Then it is gone, whether it is removed already or not."""
        kit.advance(-kit.now % HOUR)
        owner, kept = an_owner(), KEPT_SECONDS[length]
        kit.store.activity.add(owner, SOME, token=a_token())
        kit.advance(length + kept - 1)
        assert counted(kit.store, owner, length=length, seconds=10 * kept) == SOME
        kit.advance(1)
        kit.store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())

        assert counted(kit.store, owner, length=length, seconds=10 * kept) == {"pay": {"new": 1}}

    @for_each(
        "endpoint",
        ("", "inbox:ledger", "größe ✓", 'a "quoted" \\ one', "{}:,", "a\nb\0c", "%s :now 'x'", "x" * 5000),
        ids=("empty", "inbox", "unicode", "quotes", "json", "control", "sql", "long"),
    )
    def test_an_endpoint_may_have_any_name(self, kit: Kit, endpoint: str) -> None:
        owner = an_owner()
        for _ in range(2):
            kit.store.activity.add(
                owner, {endpoint: {"would:replayed@cookie": 2**40}, "other": {"new": 1}}, token=a_token()
            )

        expected = {endpoint: {"would:replayed@cookie": 2**41}, "other": {"new": 2}}
        assert expected == counted(kit.store, owner)
        assert expected == counted(kit.store, owner, length=HOUR)

    def test_a_clock_that_is_set_back_loses_no_count(self, kit: Kit) -> None:
        """They stand in the minute that the clock shows."""
        owner = an_owner()
        kit.advance(600)
        kit.store.activity.add(owner, {"pay": {"new": 1}}, token=a_token())
        kit.advance(-300)
        kit.store.activity.add(owner, {"pay": {"new": 2}}, token=a_token())
        kit.advance(300)

        assert counted(kit.store, owner) == {"pay": {"new": 3}}

    def test_many_processes_lose_no_count(self, kit: Kit) -> None:
        """They add to the same minute at the same time: to the same counters, and each to some that are new."""
        owner = an_owner()

        def add(number: int) -> None:
            for turn in range(ROUNDS):
                counts = {"pay": {"new": 1, f"t:new:{number}": 1}, f"only-{number}-{turn}": {"new": 2}}
                kit.store.activity.add(owner, counts, token=a_token())

        at_once(*[partial(add, number) for number in range(THREADS)])
        expected: dict[str, dict[str, int]] = {
            f"only-{number}-{turn}": {"new": 2} for number in range(THREADS) for turn in range(ROUNDS)
        }
        expected["pay"] = {"new": THREADS * ROUNDS} | {f"t:new:{number}": ROUNDS for number in range(THREADS)}

        assert expected == counted(kit.store, owner)
        assert expected == counted(kit.store, owner, length=HOUR)

    def test_of_many_equal_calls_one_adds(self, kit: Kit) -> None:
        """A first try that arrives late meets its own repetition."""
        for _ in range(ROUNDS):
            owner, token = an_owner(), a_token()
            at_once(*[partial(kit.store.activity.add, owner, SOME, token=token)] * THREADS)

            assert counted(kit.store, owner) == SOME


def seen_by(
    kit: Kit, key: StorageKey, token: bytes = b"", *, fingerprint: bytes = FINGERPRINT, hold_lapsed: bool = False
) -> Observed:
    """What a new request finds, or the one with this token."""
    return kit.store.observations.observe(
        key, token=token or a_token(), fingerprint=fingerprint, lease=LEASE, keep=KEEP, hold_lapsed=hold_lapsed
    )


def watched(kit: Kit) -> tuple[StorageKey, bytes]:
    """Return a new key, and the token of the first request that is seen with it."""
    key, token = kit.key(), a_token()
    seen_by(kit, key, token)
    return key, token


def found(sighting: Sighting, ago: float = 0.0) -> Observed:
    return Observed(sighting, near(ago))


class ObservationsContract(Contract):
    """The contract of `flask_idempotency.engine.observations.Observations`. Override `store`."""

    def test_the_second_request_conflicts_while_the_first_runs(self, kit: Kit) -> None:
        """And so does a third. Each learns how long ago the first one began."""
        key = kit.key()
        assert found(Sighting.NEW) == seen_by(kit, key)
        kit.advance(2.5)

        assert [found(Sighting.CONFLICT, 2.5)] * 2 == [seen_by(kit, key) for _ in range(2)]

    @for_each(("ending", "then"), ((Ending.KEPT, Sighting.REPLAY), (Ending.QUARANTINED, Sighting.UNKNOWN)))
    def test_an_ending_is_what_later_requests_find(self, kit: Kit, ending: Ending, then: Sighting) -> None:
        """For `keep` seconds from the end. Then the key is new."""
        key, token = watched(kit)
        kit.advance(5)
        kit.store.observations.end(key, token, ending, keep=KEEP)
        kit.advance(KEEP - 0.125)
        assert [found(then, KEEP + 4.875)] * 2 == [seen_by(kit, key) for _ in range(2)]
        kit.advance(0.125)

        assert found(Sighting.NEW) == seen_by(kit, key)

    def test_a_released_key_is_new(self, kit: Kit) -> None:
        key, token = watched(kit)
        kit.store.observations.end(key, token, Ending.RELEASED, keep=KEEP)

        assert found(Sighting.NEW) == seen_by(kit, key, fingerprint=OTHER_FINGERPRINT)

    @for_each("ending", (None, Ending.KEPT, Ending.QUARANTINED, "lapsed"))
    def test_another_request_mismatches_in_any_state(self, kit: Kit, ending: Ending | str | None) -> None:
        """It changes nothing, so the watched request is found as before."""
        key, token = watched(kit)
        if isinstance(ending, Ending):
            kit.store.observations.end(key, token, ending, keep=KEEP)
        kit.advance(LEASE + 1 if ending == "lapsed" else 1)
        for hold in (False, True):
            other = seen_by(kit, key, fingerprint=OTHER_FINGERPRINT, hold_lapsed=hold)
            assert Sighting.MISMATCH is other.sighting

        expected = {
            None: Sighting.CONFLICT,
            Ending.KEPT: Sighting.REPLAY,
            Ending.QUARANTINED: Sighting.UNKNOWN,
            "lapsed": Sighting.TAKEN_OVER,
        }
        assert expected[ending] is seen_by(kit, key).sighting

    def test_the_same_request_again_finds_what_it_found(self, kit: Kit) -> None:
        """Its reply may have been lost. The one that took over, too."""
        key, token, heir = kit.key(), a_token(), a_token()
        for _ in range(2):
            assert found(Sighting.NEW) == seen_by(kit, key, token)
            kit.advance(1)
        kit.advance(LEASE)
        for _ in range(2):
            assert found(Sighting.TAKEN_OVER, LEASE + 2) == seen_by(kit, key, heir)
            kit.advance(1)

    def test_a_lapsed_lease_is_taken_over(self, kit: Kit) -> None:
        """When it ends, and by one request. The one before may write no more."""
        (key, token), heir = watched(kit), a_token()
        kit.advance(LEASE - 0.125)
        assert Sighting.CONFLICT is seen_by(kit, key, heir).sighting
        kit.advance(0.125)
        assert found(Sighting.TAKEN_OVER, LEASE) == seen_by(kit, key, heir)
        for ending in Ending:
            kit.store.observations.end(key, token, ending, keep=KEEP)

        assert found(Sighting.CONFLICT, LEASE) == seen_by(kit, key)
        kit.store.observations.end(key, heir, Ending.KEPT, keep=KEEP)
        assert found(Sighting.REPLAY, LEASE) == seen_by(kit, key)

    def test_a_lapsed_lease_may_leave_the_outcome_unknown(self, kit: Kit) -> None:
        """For `keep` seconds, whatever later requests would do. Its own end comes too late."""
        key, token = watched(kit)
        kit.advance(LEASE)
        assert found(Sighting.UNKNOWN, LEASE) == seen_by(kit, key, hold_lapsed=True)
        kit.store.observations.end(key, token, Ending.KEPT, keep=KEEP)
        kit.advance(KEEP - 0.125)
        assert Sighting.UNKNOWN is seen_by(kit, key).sighting
        kit.advance(0.125)

        assert found(Sighting.NEW) == seen_by(kit, key)

    def test_a_late_end_counts_if_no_request_took_over(self, kit: Kit) -> None:
        key, token = watched(kit)
        kit.advance(LEASE + 5)
        kit.store.observations.end(key, token, Ending.KEPT, keep=KEEP)

        assert found(Sighting.REPLAY, LEASE + 5) == seen_by(kit, key)

    def test_a_renewal_extends_the_lease_and_never_shortens_it(self, kit: Kit) -> None:
        key, token = watched(kit)
        kit.advance(LEASE - 1)
        kit.store.observations.renew(key, token, lease=LEASE)
        kit.store.observations.renew(key, token, lease=1)
        kit.advance(LEASE - 0.125)
        assert Sighting.CONFLICT is seen_by(kit, key).sighting
        kit.advance(0.125)

        assert Sighting.TAKEN_OVER is seen_by(kit, key).sighting

    def test_a_renewal_by_another_request_is_harmless(self, kit: Kit) -> None:
        """So is one after the end, and one of a key that no request has used."""
        (key, _), (ended, token) = watched(kit), watched(kit)
        kit.store.observations.end(ended, token, Ending.KEPT, keep=1)
        for renewed in (key, ended, kit.key()):
            kit.store.observations.renew(renewed, token, lease=KEEP)
        kit.advance(LEASE)

        assert Sighting.TAKEN_OVER is seen_by(kit, key).sighting
        assert Sighting.NEW is seen_by(kit, ended).sighting

    def test_the_first_end_counts(self, kit: Kit) -> None:
        """A repeated one is harmless, and so is one of a key that no request has used."""
        key, token = watched(kit)
        for ending in (Ending.KEPT, Ending.KEPT, Ending.QUARANTINED, Ending.RELEASED):
            kit.store.observations.end(key, token, ending, keep=KEEP)
            kit.store.observations.end(kit.key(), token, ending, keep=KEEP)

        assert Sighting.REPLAY is seen_by(kit, key).sighting

    def test_a_request_that_never_ends_is_forgotten(self, kit: Kit) -> None:
        """After its lease and `keep` seconds. Then it can neither renew nor end."""
        key, token = watched(kit)
        kit.store.observations.renew(key, token, lease=2 * LEASE)
        kit.advance(2 * LEASE + KEEP - 0.125)
        assert Sighting.MISMATCH is seen_by(kit, key, fingerprint=OTHER_FINGERPRINT).sighting
        kit.advance(0.125)
        kit.store.observations.renew(key, token, lease=LEASE)
        kit.store.observations.end(key, token, Ending.KEPT, keep=KEEP)

        assert found(Sighting.NEW) == seen_by(kit, key, fingerprint=OTHER_FINGERPRINT)

    def test_a_clock_that_is_set_back_makes_no_negative_time(self, kit: Kit) -> None:
        key, _ = watched(kit)
        kit.advance(-10)

        assert found(Sighting.CONFLICT) == seen_by(kit, key)

    def test_keys_are_apart_also_of_one_tenant(self, kit: Kit) -> None:
        key, _ = watched(kit)

        assert found(Sighting.NEW) == seen_by(kit, kit.key(key.tid))

    def test_a_claim_never_finds_an_observation(self, kit: Kit) -> None:
        """Nor an observation a record."""
        key, claimed = kit.key(), kit.key()
        seen_by(kit, key)
        assert kit.store.read(key) is None
        kit.granted(key, fingerprint=OTHER_FINGERPRINT)
        kit.granted(claimed)

        assert Sighting.CONFLICT is seen_by(kit, key).sighting
        assert found(Sighting.NEW) == seen_by(kit, claimed, fingerprint=OTHER_FINGERPRINT)

    @for_each(("lapsed", "first"), ((False, Sighting.NEW), (True, Sighting.TAKEN_OVER)))
    def test_of_many_one_is_new(self, kit: Kit, lapsed: bool, first: Sighting) -> None:
        """Or takes over, if a lease is over. All others conflict with it."""
        for _ in range(ROUNDS):
            key = kit.key()
            if lapsed:
                seen_by(kit, key)
                kit.advance(LEASE)
            observed = at_once(*[partial(seen_by, kit, key)] * THREADS)

            assert Counter(each.sighting for each in observed) == {first: 1, Sighting.CONFLICT: THREADS - 1}


def an_actor() -> str:
    """An operator that no other test uses."""
    return secrets.token_hex(8)


SETTLED = AuditEntry("completed", "quarantined", "ann", "the bank confirms it")


class AuditTrailContract(Contract):
    """The contract of `flask_idempotency.engine.audit.AuditTrail`. Override `store`."""

    def test_entries_are_returned_in_order_and_with_their_times(self, kit: Kit) -> None:
        """The store sets the time, whatever the caller gave."""
        key, entries = kit.key(), []
        for number in range(4):
            entry = replace(SETTLED, reason=f"reason {number}", certain=number != 2, at=5.0)
            entry = replace(entry, step="charge" if number == 1 else "", forced=number == 3)
            kit.store.audit.append(key, entry, token=a_token())
            entries.append(replace(entry, at=near(kit.now)))
            kit.advance(1.5)

        assert entries == list(kit.store.audit.entries(key))
        assert entries[-2:] == list(kit.store.audit.entries(key, limit=2))

    def test_a_record_without_changes_has_no_entry(self, kit: Kit) -> None:
        """Also if another record of the tenant has."""
        key = kit.key()
        kit.store.audit.append(key, SETTLED, token=a_token())

        assert list(kit.store.audit.entries(kit.key(key.tid))) == []

    def test_the_same_call_again_adds_nothing(self, kit: Kit) -> None:
        key, token, actor = kit.key(), a_token(), an_actor()
        for _ in range(3):
            kit.store.audit.append(key, replace(SETTLED, actor=actor), token=token)
            kit.advance(1)

        assert ([near(kit.now - 3)], 1) == (
            [entry.at for entry in kit.store.audit.entries(key)],
            kit.store.audit.count(actor, seconds=60),
        )

    @for_each(
        "text",
        ("", "größer ✓ \\ \" ' % :now", "a\nb\0c\ud800", '["x"]'),
        ids=("empty", "odd", "control", "json"),
    )
    def test_texts_are_returned_unchanged(self, kit: Kit, text: str) -> None:
        key, entry = kit.key(), replace(SETTLED, verb="never-happened", actor=text, reason=text, certain=False)
        kit.store.audit.append(key, entry, token=a_token())

        (returned,) = kit.store.audit.entries(key)
        assert entry == replace(returned, at=0.0)

    def test_a_text_within_its_limit_is_whole(self, kit: Kit) -> None:
        """A longer one may be cut at the limit, and never fails."""
        key, actor = kit.key(), an_actor() + "é" * LONGEST_ACTOR
        for extra in (0, 3):
            entry = replace(SETTLED, actor=actor[: LONGEST_ACTOR + extra], reason="é" * (LONGEST_REASON + extra))
            kit.store.audit.append(key, entry, token=a_token())

        for entry in kit.store.audit.entries(key):
            assert (actor[:LONGEST_ACTOR], "é" * LONGEST_REASON) == (
                entry.actor[:LONGEST_ACTOR],
                entry.reason[:LONGEST_REASON],
            )
        assert kit.store.audit.count(actor[: LONGEST_ACTOR + 3], seconds=60) == 2

    def test_an_entry_is_kept_for_a_year_and_more(self, kit: Kit) -> None:
        """Then it is gone, also while later ones stay."""
        key = kit.key()
        kit.store.audit.append(key, SETTLED, token=a_token())
        kit.advance(AUDIT_KEPT_SECONDS - 1)
        later = replace(SETTLED, reason="again")
        kit.store.audit.append(key, later, token=a_token())
        assert [entry.reason for entry in kit.store.audit.entries(key)] == ["the bank confirms it", "again"]
        kit.advance(1)

        assert [entry.reason for entry in kit.store.audit.entries(key)] == ["again"]

    def test_the_changes_of_an_actor_are_counted(self, kit: Kit) -> None:
        """In a span until now, of all records, and not those of others."""
        actor = an_actor()
        for _ in range(3):
            kit.store.audit.append(kit.key(), replace(SETTLED, actor=actor), token=a_token())
            kit.store.audit.append(kit.key(), replace(SETTLED, actor=an_actor()), token=a_token())
            kit.advance(10)

        assert [kit.store.audit.count(actor, seconds=span) for span in (10, 20, 20.5, 40, 86400)] == [0, 1, 2, 3, 3]
        kit.advance(86400)
        assert (kit.store.audit.count(actor, seconds=86400), kit.store.audit.count(an_actor(), seconds=86400)) == (0, 0)

    def test_a_tenant_is_forgotten(self, kit: Kit) -> None:
        """All its records, and those of no other tenant. It is harmless again, and if there were none."""
        key, other = kit.key(), kit.key()
        keys = [key, kit.key(key.tid), kit.key(key.tid)]
        for each in (*keys, other):
            for _ in range(2):
                kit.store.audit.append(each, SETTLED, token=a_token())
        for _ in range(2):
            kit.store.audit.forget(key.tid)

        assert [len(kit.store.audit.entries(each)) for each in (*keys, other)] == [0, 0, 0, 2]
        kit.store.audit.append(key, SETTLED, token=a_token())
        assert len(kit.store.audit.entries(key)) == 1

    def test_many_actors_lose_no_entry(self, kit: Kit) -> None:
        """Of one record, at the same time."""
        key, actor = kit.key(), an_actor()

        def append(number: int) -> None:
            for turn in range(ROUNDS):
                kit.store.audit.append(key, replace(SETTLED, actor=actor, reason=f"{number} {turn}"), token=a_token())

        at_once(*[partial(append, number) for number in range(THREADS)])
        expected = {f"{number} {turn}" for number in range(THREADS) for turn in range(ROUNDS)}

        entries = kit.store.audit.entries(key, limit=1000)
        assert (len(expected), expected) == (len(entries), {entry.reason for entry in entries})
        assert len(expected) == kit.store.audit.count(actor, seconds=60)
