"""Contract of `claim`: free keys, duplicates, cancelled claims, fencing and ownership."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    CALLER_UNKNOWN,
    Callers,
    InFlight,
    Mismatched,
    OnExpiry,
    OtherCaller,
    Record,
    RequestInfo,
    State,
    Unknown,
)
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    lost,
    near,
    placed,
    stand,
)
from flask_idempotency.testing.doubles import FrozenClock

# The states of a record in which the store refuses a claim without a write.
REFUSING = ("in flight", "completed", "quarantined")
EVERY_STANDING = (*REFUSING, "lapsed, takeover", "lapsed, quarantine")


class Claiming:
    """`claim` checks a key in a fixed order, and a refused claim changes no record."""

    def test_a_free_key_is_granted(self, store: Store) -> None:
        """The first request gets the key, as attempt 1, for the requested lease."""
        token = a_token()

        grant = granted(store.claim(a_request(a_key()), token=token, lease=LEASE))

        assert (token, 1, near(LEASE)) == (grant.token, grant.attempt, grant.lease)

    @for_each("on_expiry", list(OnExpiry))
    def test_a_granted_claim_can_be_read(self, store: Store, clock: FrozenClock, on_expiry: OnExpiry) -> None:
        """The record holds all fields of the claim, and a deadline on the store's clock."""
        key, token = a_key(), a_token()
        grant = granted(store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE))

        record = found(store, key)

        assert (State.PROCESSING, token, grant.fence, 1) == (record.state, record.token, record.fence, record.attempt)
        assert (FINGERPRINT, on_expiry, ABOUT) == (record.fingerprint, record.on_expiry, record.info)
        assert (near(clock.now), near(clock.now + LEASE)) == (record.requested_at, record.deadline)
        assert (near(LEASE), None, None, "") == (record.remaining, record.completed_at, record.payload, record.reason)

    @for_each(
        "about",
        (
            RequestInfo(),
            RequestInfo(tenant="", principal="alice", method="", operation="x"),
            RequestInfo(tenant="a\0b", principal="{x}:*\r\n", method="Ü", operation="日本語 🦊"),
            RequestInfo(tenant="\udc80", principal="p" * 10_000, method="PATCH", operation="o" * 300),
        ),
        ids=("empty", "partly", "hostile", "long"),
    )
    def test_names_in_a_record_survive(self, store: Store, about: RequestInfo) -> None:
        """Tenants and principals may be any text of the application, before and after completion."""
        key, token = a_key(), a_token()
        store.claim(a_request(key, about=about), token=token, lease=LEASE)
        before = found(store, key).info
        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (about, about) == (before, found(store, key).info)

    def test_an_unused_key_has_no_record(self, store: Store) -> None:
        """Absent is None, not an empty record."""
        assert store.read(a_key()) is None

    def test_keys_do_not_touch_each_other(self, store: Store) -> None:
        """Another key of the same tenant, and one of another tenant, are free and stay as they were."""
        key = a_key()
        neighbours = [a_key(tid=key.tid), a_key()]
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        before = found(store, key)

        for neighbour in neighbours:
            token = a_token()
            granted(store.claim(a_request(neighbour), token=token, lease=LEASE))
            store.complete(neighbour, token, PAYLOAD, keep=KEEP)

        assert before == found(store, key)

    def test_the_same_token_is_granted_again(self, store: Store, clock: FrozenClock) -> None:
        """
        A claim whose reply was lost is repeated, by client libraries without the caller's knowledge. It must not be told
        that the key is taken: it was taken by itself. Nothing is gained by it either, such as a longer lease.
        """
        key, token = a_key(), a_token()
        first = granted(store.claim(a_request(key), token=token, lease=LEASE))
        before = found(store, key)
        clock.advance(10)

        again = granted(store.claim(a_request(key), token=token, lease=LEASE))

        assert (first.fence, 1, near(LEASE - 10)) == (again.fence, again.attempt, again.lease)
        assert before.deadline == found(store, key).deadline

    @for_each("on_expiry", list(OnExpiry))
    def test_the_same_token_is_granted_again_after_its_lease(
        self, store: Store, clock: FrozenClock, on_expiry: OnExpiry
    ) -> None:
        """The lease limits what other workers may do, and none has acted."""
        key, token = a_key(), a_token()
        first = granted(store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE))
        clock.advance(LEASE + 1)

        again = granted(store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE))

        assert (first.fence, 1, 0.0) == (again.fence, again.attempt, again.lease)

    def test_a_taken_key_is_in_flight(self, store: Store, clock: FrozenClock) -> None:
        """The duplicate gets the seconds that are left of the worker's lease."""
        key, _ = placed(store, clock, "in flight")
        clock.advance(12)

        assert InFlight(near(LEASE - 12)) == store.claim(a_request(key), token=a_token(), lease=600)

    def test_a_completed_key_is_replayed(self, store: Store, clock: FrozenClock) -> None:
        """The outcome holds the same record as `read`."""
        key, _ = placed(store, clock, "completed")

        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)

        assert found(store, key) == outcome

    def test_a_quarantined_key_is_unknown(self, store: Store, clock: FrozenClock) -> None:
        """The outcome gives the reason."""
        key, _ = placed(store, clock, "quarantined")

        assert Unknown("view-crashed") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    @for_each("standing", REFUSING)
    @for_each("fingerprint", (FINGERPRINT, OTHER_FINGERPRINT), ids=("same", "other"))
    def test_refusal_changes_nothing(
        self, store: Store, clock: FrozenClock, standing: Standing, fingerprint: bytes
    ) -> None:
        """
        A refused duplicate leaves no trace, and a third caller is refused like the second. Stores have deleted the
        owner's record on behalf of a caller that they had just turned away.
        """
        key, _ = placed(store, clock, standing)
        before = found(store, key)
        ask = a_request(
            key, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, about=RequestInfo(principal="mallory")
        )

        second = store.claim(ask, token=a_token(), lease=600)
        third = store.claim(ask, token=a_token(), lease=600)

        assert second == third
        assert isinstance(second, InFlight | Record | Unknown | Mismatched)
        assert before == found(store, key)

    @for_each("standing", REFUSING)
    def test_a_refused_token_owns_nothing(self, store: Store, clock: FrozenClock, standing: Standing) -> None:
        """A refused claim does not turn into a granted one when it is repeated."""
        key, _ = placed(store, clock, standing)
        refused = a_token()
        first = store.claim(a_request(key), token=refused, lease=LEASE)

        assert first == store.claim(a_request(key), token=refused, lease=LEASE)

    @for_each("standing", EVERY_STANDING)
    def test_another_request_is_a_mismatch_before_anything_else(
        self, store: Store, clock: FrozenClock, standing: Standing
    ) -> None:
        """
        A key used for something else is said to be so at once, also while the first use is running or is lost: a 409
        would invite a retry that can never succeed. Nothing changes, and a lapsed record stays lapsed.
        """
        key = a_key()
        used_at = clock.now
        stand(store, clock, key, standing)
        before = found(store, key)

        outcome = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)

        assert Mismatched(first_seen=near(used_at)) == outcome
        assert before == found(store, key)

    def test_the_owners_own_token_with_another_request_is_a_mismatch(self, store: Store) -> None:
        """The fingerprint is looked at before the token."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))

        outcome = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=token, lease=LEASE)

        assert isinstance(outcome, Mismatched)

    @for_each("standing", EVERY_STANDING)
    def test_a_record_of_another_caller_is_left_alone(
        self, store: Store, clock: FrozenClock, standing: Standing
    ) -> None:
        """
        Several callers may have had the name of this key. What one of them made there is no business of another: it is
        neither replayed nor taken over nor quarantined, whether or not the requests are the same.
        """
        key, used_at = a_key(), clock.now
        stand(store, clock, key, standing)
        before = found(store, key)
        # Spelled alike, one after the other, and each the beginning of the record's.
        others = Callers(frozenset({("acme", "bob"), ("acmea", "lice"), ("acme", "alic"), ("", ""), ("alice", "acme")}))

        for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
            ask = a_request(key, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, callers=others)
            assert OtherCaller(first_seen=near(used_at)) == store.claim(ask, token=a_token(), lease=LEASE)

        assert before == found(store, key)

    @for_each("standing", EVERY_STANDING)
    def test_a_record_that_shows_no_caller_is_not_taken_over(
        self, store: Store, clock: FrozenClock, standing: Standing
    ) -> None:
        """It may be anyone's. It keeps others out and is replayed as before, but no claim takes it over."""
        key, _ = placed(store, clock, standing)
        before = found(store, key)
        ask = a_request(
            key,
            on_expiry=OnExpiry.TAKEOVER,
            callers=Callers(frozenset({("acme", "bob")}), frozenset({("acme", "alice")})),
        )

        outcome = store.claim(ask, token=a_token(), lease=LEASE)

        match standing:
            case "in flight":
                assert isinstance(outcome, InFlight)
            case "completed":
                assert before == outcome
            case "quarantined":
                assert Unknown("view-crashed") == outcome
            case _:
                assert Unknown(CALLER_UNKNOWN) == outcome
        assert before == found(store, key)

    @for_each("quota", (None, Quota(records=5)), ids=("no quota", "quota"))
    def test_a_record_of_the_caller_counts(self, store: Store, clock: FrozenClock, quota: Quota | None) -> None:
        """Whichever of its names the record has. A key without a record, or with an expired one, is free to everyone."""
        if quota is not None and not hasattr(store, "ledger"):
            return
        key, first, second = a_key(), a_token(), a_token()
        names = Callers(frozenset({("", "alice"), ("acme", "alice")}), frozenset({("", "")}), former=True)
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER, callers=names)

        assert granted(store.claim(ask, token=first, lease=LEASE, quota=quota)).attempt == 1
        assert granted(store.claim(ask, token=first, lease=LEASE, quota=quota)).attempt == 1
        clock.advance(LEASE + 1)
        assert granted(store.claim(ask, token=second, lease=LEASE, quota=quota)).attempt == 2
        store.complete(key, second, PAYLOAD, keep=KEEP)
        assert isinstance(store.claim(ask, token=a_token(), lease=LEASE, quota=quota), Record)
        clock.advance(2 * KEEP)
        others = a_request(key, callers=Callers(frozenset({("acme", "bob")})))
        assert granted(store.claim(others, token=a_token(), lease=LEASE, quota=quota)).attempt == 1

    @for_each("lease", (0.0, -1.0, math.inf, math.nan))
    def test_a_claim_without_an_end_is_refused(self, store: Store, lease: float) -> None:
        """A record without a deadline could never expire."""
        key = a_key()

        with pytest.raises(ValueError, match="duration"):
            store.claim(a_request(key), token=a_token(), lease=lease)

        assert store.read(key) is None


# That fences rise for ever.


class Fencing:
    """A later claim of a key has a higher fence, so that `WHERE fence <= :mine` keeps an earlier one out."""

    @for_each("ended", ("released", "released, clock set back", "expired", "taken over"))
    def test_the_next_fence_is_higher(self, store: Store, clock: FrozenClock, ended: str) -> None:
        """After every end of the last claim, and after every change of the clock."""
        key = a_key()
        fences = []
        for _ in range(4):
            token = a_token()
            ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)
            fences.append(granted(store.claim(ask, token=token, lease=LEASE)).fence)
            match ended:
                case "released":
                    store.release(key, token)
                case "released, clock set back":
                    store.release(key, token)
                    clock.advance(-7200)
                case "expired":
                    store.complete(key, token, PAYLOAD, keep=KEEP)
                    clock.advance(KEEP)
                case "taken over":
                    clock.advance(LEASE)

        assert sorted(set(fences)) == fences

    def test_a_clock_set_back_does_not_free_a_key(self, store: Store, clock: FrozenClock) -> None:
        """The lease lasts longer then: late, not unsafe. The take-over still gets the higher fence."""
        key = a_key()
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)
        first = granted(store.claim(ask, token=a_token(), lease=LEASE))
        clock.advance(-86400)
        refused = store.claim(ask, token=a_token(), lease=LEASE)
        clock.advance(86400 + LEASE)

        assert getattr(refused, "retry_after", 0) > LEASE
        assert granted(store.claim(ask, token=a_token(), lease=LEASE)).fence > first.fence

    def test_a_fence_is_a_positive_number_that_databases_can_hold(self, store: Store) -> None:
        """A signed 64-bit column, and a double without loss."""
        fence = granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence

        assert 0 < fence < 2**53


# A claim whose reply never came is released, and may arrive after that.


class Cancelling:
    """The sender of a released token has gone. A grant to it would block the key until its lease expires."""

    def test_a_claim_that_comes_after_its_release_is_not_granted(self, store: Store) -> None:
        """The key stays free for the next request."""
        key, token = a_key(), a_token()
        store.release(key, token)

        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=token, lease=LEASE)

        assert store.read(key) is None
        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).attempt == 1

    @for_each("times", (1, 2))
    def test_a_claim_that_comes_once_more_after_its_release_is_not_granted(self, store: Store, times: int) -> None:
        """Also if the release was sent twice: a client without a reply repeats it."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        for _ in range(times):
            store.release(key, token)

        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=token, lease=LEASE)

        assert store.read(key) is None
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    def test_a_claim_that_was_given_up_learns_what_others_do(self, store: Store) -> None:
        """The store refuses it as any other claim, and returns the state of the key."""
        key, token, others = a_key(), a_token(), a_token()
        store.release(key, token)
        granted(store.claim(a_request(key), token=others, lease=LEASE))

        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), InFlight)
        store.complete(key, others, PAYLOAD, keep=KEEP)
        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Record)


# That a token which is no longer the record's cannot write.

Write = Callable[[Store, StorageKey, bytes], None]


def _renew(store: Store, key: StorageKey, token: bytes) -> None:
    store.renew(key, token, lease=600)


def _mark(store: Store, key: StorageKey, token: bytes) -> None:
    store.mark_point_of_no_return(key, token)


def _complete(store: Store, key: StorageKey, token: bytes) -> None:
    store.complete(key, token, OTHER_PAYLOAD, keep=2 * KEEP)


def _release(store: Store, key: StorageKey, token: bytes) -> None:
    store.release(key, token)


def _hold(store: Store, key: StorageKey, token: bytes) -> None:
    store.quarantine(key, token, "stale")


WRITES = (_renew, _mark, _complete, _release, _hold)
every_write: Callable[[Callable[..., None]], Callable[..., None]] = for_each(
    "write", WRITES, ids=[write.__name__[1:] for write in WRITES]
)


class Ownership:
    """Every write after the claim carries its token, and only the record's own token writes."""

    @every_write
    @for_each("standing", ("in flight", "completed", "quarantined"))
    def test_a_stale_token_changes_nothing(
        self, store: Store, clock: FrozenClock, write: Write, standing: Standing
    ) -> None:
        """The owner's record is unchanged, and the stale worker gets `LeaseLost`."""
        key = a_key()
        stale = stand(store, clock, key, "in flight")
        store.release(key, stale)
        stand(store, clock, key, standing)
        before = found(store, key)

        assert lost(lambda: write(store, key, stale))

        assert before == found(store, key)

    @every_write
    def test_a_token_that_was_taken_over_changes_nothing(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """A worker that stalls past its lease cannot touch its successor's record."""
        key = a_key()
        slow = stand(store, clock, key, "lapsed, takeover")
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        before = found(store, key)

        assert lost(lambda: write(store, key, slow))

        assert before == found(store, key)

    @every_write
    def test_a_token_that_never_owned_changes_nothing(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """Not even on a record whose lease is over: it must be claimed first."""
        key, _ = placed(store, clock, "lapsed, takeover")
        before = found(store, key)

        assert lost(lambda: write(store, key, a_token()))

        assert before == found(store, key)

    @for_each(
        "write", (_renew, _mark, _complete, _hold), ids=("renew", "mark_point_of_no_return", "complete", "quarantine")
    )
    def test_a_released_key_takes_no_writes(self, store: Store, clock: FrozenClock, write: Write) -> None:
        """An absent record has no owner, and no write restores it."""
        key = a_key()
        former = stand(store, clock, key, "in flight")
        store.release(key, former)

        assert lost(lambda: write(store, key, former))

        assert store.read(key) is None

    @every_write
    def test_a_former_owner_is_not_mistaken_for_the_present_one(
        self, store: Store, clock: FrozenClock, write: Write
    ) -> None:
        """
        A stalls, B takes over and releases, C claims: the key looks as it did when A left it. A's write is refused and
        C's response stays.
        """
        key = a_key()
        first = stand(store, clock, key, "lapsed, takeover")
        second, third = a_token(), a_token()
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=second, lease=LEASE))
        store.release(key, second)
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=third, lease=LEASE))

        assert lost(lambda: write(store, key, first))
        store.complete(key, third, PAYLOAD, keep=KEEP)

        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert isinstance(outcome, Record)
        assert (third, PAYLOAD) == (outcome.token, outcome.payload)

    def test_the_late_finisher_is_fenced_off(self, store: Store, clock: FrozenClock) -> None:
        """The store keeps the response of the attempt that owns the key, whichever is ready first."""
        key = a_key()
        slow = stand(store, clock, key, "lapsed, takeover")
        fast = a_token()
        granted(store.claim(a_request(key), token=fast, lease=LEASE))
        store.complete(key, fast, PAYLOAD, keep=KEEP)

        assert lost(lambda: store.complete(key, slow, OTHER_PAYLOAD, keep=KEEP))

        assert (found(store, key).state, found(store, key).payload) == (State.COMPLETED, PAYLOAD)
