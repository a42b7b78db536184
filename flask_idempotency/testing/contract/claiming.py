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
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Contract,
    Kit,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
    lost,
    near,
)

# The states of a record in which the store refuses a claim without a write.
REFUSING = ("in flight", "completed", "quarantined")
EVERY_STANDING = (*REFUSING, "lapsed, takeover", "lapsed, quarantine")


class Claiming(Contract):
    """`claim` checks a key in a fixed order, and a refused claim changes no record."""

    def test_a_free_key_is_granted(self, kit: Kit) -> None:
        """The first request gets the key, as attempt 1, for the requested lease."""
        token = a_token()

        grant = kit.granted(a_key(), token=token)

        assert (token, 1, near(LEASE)) == (grant.token, grant.attempt, grant.lease)

    @for_each("on_expiry", list(OnExpiry))
    def test_a_granted_claim_can_be_read(self, kit: Kit, on_expiry: OnExpiry) -> None:
        """The record holds all fields of the claim, and a deadline on the store's clock."""
        key, token = a_key(), a_token()
        grant = kit.granted(key, on_expiry=on_expiry, token=token)

        record = kit.found(key)

        assert (State.PROCESSING, token, grant.fence, 1) == (record.state, record.token, record.fence, record.attempt)
        assert (FINGERPRINT, on_expiry, ABOUT) == (record.fingerprint, record.on_expiry, record.info)
        assert (near(kit.now), near(kit.now + LEASE)) == (record.requested_at, record.deadline)
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
    def test_names_in_a_record_survive(self, kit: Kit, about: RequestInfo) -> None:
        """Tenants and principals may be any text of the application, before and after completion."""
        key, token = a_key(), a_token()
        kit.ask(key, about=about, token=token)
        before = kit.found(key).info
        kit.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (about, about) == (before, kit.found(key).info)

    def test_an_unused_key_has_no_record(self, kit: Kit) -> None:
        """Absent is None, not an empty record."""
        assert kit.store.read(a_key()) is None

    def test_keys_do_not_touch_each_other(self, kit: Kit) -> None:
        """Another key of the same tenant, and one of another tenant, are free and stay as they were."""
        key = a_key()
        neighbours = [a_key(tid=key.tid), a_key()]
        kit.granted(key)
        before = kit.found(key)

        for neighbour in neighbours:
            token = a_token()
            kit.granted(neighbour, token=token)
            kit.store.complete(neighbour, token, PAYLOAD, keep=KEEP)

        assert before == kit.found(key)

    def test_the_same_token_is_granted_again(self, kit: Kit) -> None:
        """
        A claim whose reply was lost is repeated, by client libraries without the caller's knowledge. It must not be told
        that the key is taken: it was taken by itself. Nothing is gained by it either, such as a longer lease.
        """
        key, token = a_key(), a_token()
        first = kit.granted(key, token=token)
        before = kit.found(key)
        kit.advance(10)

        again = kit.granted(key, token=token)

        assert (first.fence, 1, near(LEASE - 10)) == (again.fence, again.attempt, again.lease)
        assert before.deadline == kit.found(key).deadline

    @for_each("on_expiry", list(OnExpiry))
    def test_the_same_token_is_granted_again_after_its_lease(self, kit: Kit, on_expiry: OnExpiry) -> None:
        """The lease limits what other workers may do, and none has acted."""
        key, token = a_key(), a_token()
        first = kit.granted(key, on_expiry=on_expiry, token=token)
        kit.advance(LEASE + 1)

        again = kit.granted(key, on_expiry=on_expiry, token=token)

        assert (first.fence, 1, 0.0) == (again.fence, again.attempt, again.lease)

    def test_a_taken_key_is_in_flight(self, kit: Kit) -> None:
        """The duplicate gets the seconds that are left of the worker's lease."""
        key, _ = kit.placed("in flight")
        kit.advance(12)

        assert InFlight(near(LEASE - 12)) == kit.ask(key, lease=600)

    def test_a_completed_key_is_replayed(self, kit: Kit) -> None:
        """The outcome holds the same record as `read`."""
        key, _ = kit.placed("completed")

        outcome = kit.ask(key)

        assert kit.found(key) == outcome

    def test_a_quarantined_key_is_unknown(self, kit: Kit) -> None:
        """The outcome gives the reason."""
        key, _ = kit.placed("quarantined")

        assert Unknown("view-crashed") == kit.ask(key)

    @for_each("standing", REFUSING)
    @for_each("fingerprint", (FINGERPRINT, OTHER_FINGERPRINT), ids=("same", "other"))
    def test_refusal_changes_nothing(self, kit: Kit, standing: Standing, fingerprint: bytes) -> None:
        """
        A refused duplicate leaves no trace, and a third caller is refused like the second. Stores have deleted the
        owner's record on behalf of a caller that they had just turned away.
        """
        key, _ = kit.placed(standing)
        before = kit.found(key)
        ask = a_request(
            key, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, about=RequestInfo(principal="mallory")
        )

        second = kit.store.claim(ask, token=a_token(), lease=600)
        third = kit.store.claim(ask, token=a_token(), lease=600)

        assert second == third
        assert isinstance(second, InFlight | Record | Unknown | Mismatched)
        assert before == kit.found(key)

    @for_each("standing", REFUSING)
    def test_a_refused_token_owns_nothing(self, kit: Kit, standing: Standing) -> None:
        """A refused claim does not turn into a granted one when it is repeated."""
        key, _ = kit.placed(standing)
        refused = a_token()
        first = kit.ask(key, token=refused)

        assert first == kit.ask(key, token=refused)

    @for_each("standing", EVERY_STANDING)
    def test_another_request_is_a_mismatch_before_anything_else(self, kit: Kit, standing: Standing) -> None:
        """
        A key used for something else is said to be so at once, also while the first use is running or is lost: a 409
        would invite a retry that can never succeed. Nothing changes, and a lapsed record stays lapsed.
        """
        key = a_key()
        used_at = kit.now
        kit.stand(key, standing)
        before = kit.found(key)

        outcome = kit.ask(key, fingerprint=OTHER_FINGERPRINT)

        assert Mismatched(first_seen=near(used_at)) == outcome
        assert before == kit.found(key)

    def test_the_owners_own_token_with_another_request_is_a_mismatch(self, kit: Kit) -> None:
        """The fingerprint is looked at before the token."""
        key, token = kit.begin()

        outcome = kit.ask(key, fingerprint=OTHER_FINGERPRINT, token=token)

        assert isinstance(outcome, Mismatched)

    @for_each("standing", EVERY_STANDING)
    def test_a_record_of_another_caller_is_left_alone(self, kit: Kit, standing: Standing) -> None:
        """
        Several callers may have had the name of this key. What one of them made there is no business of another: it is
        neither replayed nor taken over nor quarantined, whether or not the requests are the same.
        """
        key, used_at = a_key(), kit.now
        kit.stand(key, standing)
        before = kit.found(key)
        # Spelled alike, one after the other, and each the beginning of the record's.
        others = Callers(frozenset({("acme", "bob"), ("acmea", "lice"), ("acme", "alic"), ("", ""), ("alice", "acme")}))

        for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
            ask = a_request(key, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, callers=others)
            assert OtherCaller(first_seen=near(used_at)) == kit.store.claim(ask, token=a_token(), lease=LEASE)

        assert before == kit.found(key)

    @for_each("standing", EVERY_STANDING)
    def test_a_record_that_shows_no_caller_is_not_taken_over(self, kit: Kit, standing: Standing) -> None:
        """It may be anyone's. It keeps others out and is replayed as before, but no claim takes it over."""
        key, _ = kit.placed(standing)
        before = kit.found(key)
        ask = a_request(
            key,
            on_expiry=OnExpiry.TAKEOVER,
            callers=Callers(frozenset({("acme", "bob")}), frozenset({("acme", "alice")})),
        )

        outcome = kit.store.claim(ask, token=a_token(), lease=LEASE)

        match standing:
            case "in flight":
                assert isinstance(outcome, InFlight)
            case "completed":
                assert before == outcome
            case "quarantined":
                assert Unknown("view-crashed") == outcome
            case _:
                assert Unknown(CALLER_UNKNOWN) == outcome
        assert before == kit.found(key)

    @for_each("quota", (None, Quota(records=5)), ids=("no quota", "quota"))
    def test_a_record_of_the_caller_counts(self, kit: Kit, quota: Quota | None) -> None:
        """Whichever of its names the record has. A key without a record, or with an expired one, is free to everyone."""
        if quota is not None and not hasattr(kit.store, "ledger"):
            return
        key, first, second = a_key(), a_token(), a_token()
        names = Callers(frozenset({("", "alice"), ("acme", "alice")}), frozenset({("", "")}), former=True)
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER, callers=names)

        assert granted(kit.store.claim(ask, token=first, lease=LEASE, quota=quota)).attempt == 1
        assert granted(kit.store.claim(ask, token=first, lease=LEASE, quota=quota)).attempt == 1
        kit.advance(LEASE + 1)
        assert granted(kit.store.claim(ask, token=second, lease=LEASE, quota=quota)).attempt == 2
        kit.store.complete(key, second, PAYLOAD, keep=KEEP)
        assert isinstance(kit.store.claim(ask, token=a_token(), lease=LEASE, quota=quota), Record)
        kit.advance(2 * KEEP)
        others = a_request(key, callers=Callers(frozenset({("acme", "bob")})))
        assert granted(kit.store.claim(others, token=a_token(), lease=LEASE, quota=quota)).attempt == 1

    @for_each("lease", (0.0, -1.0, math.inf, math.nan))
    def test_a_claim_without_an_end_is_refused(self, kit: Kit, lease: float) -> None:
        """A record without a deadline could never expire."""
        key = a_key()

        with pytest.raises(ValueError, match="duration"):
            kit.ask(key, lease=lease)

        assert kit.store.read(key) is None


# That fences rise for ever.


class Fencing(Contract):
    """A later claim of a key has a higher fence, so that `WHERE fence <= :mine` keeps an earlier one out."""

    @for_each("ended", ("released", "released, clock set back", "expired", "taken over"))
    def test_the_next_fence_is_higher(self, kit: Kit, ended: str) -> None:
        """After every end of the last claim, and after every change of the clock."""
        key = a_key()
        fences = []
        for _ in range(4):
            token = a_token()
            ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)
            fences.append(granted(kit.store.claim(ask, token=token, lease=LEASE)).fence)
            match ended:
                case "released":
                    kit.store.release(key, token)
                case "released, clock set back":
                    kit.store.release(key, token)
                    kit.advance(-7200)
                case "expired":
                    kit.store.complete(key, token, PAYLOAD, keep=KEEP)
                    kit.advance(KEEP)
                case "taken over":
                    kit.advance(LEASE)

        assert sorted(set(fences)) == fences

    def test_a_clock_set_back_does_not_free_a_key(self, kit: Kit) -> None:
        """The lease lasts longer then: late, not unsafe. The take-over still gets the higher fence."""
        key = a_key()
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)
        first = granted(kit.store.claim(ask, token=a_token(), lease=LEASE))
        kit.advance(-86400)
        refused = kit.store.claim(ask, token=a_token(), lease=LEASE)
        kit.advance(86400 + LEASE)

        assert getattr(refused, "retry_after", 0) > LEASE
        assert granted(kit.store.claim(ask, token=a_token(), lease=LEASE)).fence > first.fence

    def test_a_fence_is_a_positive_number_that_databases_can_hold(self, kit: Kit) -> None:
        """A signed 64-bit column, and a double without loss."""
        fence = kit.granted(a_key()).fence

        assert 0 < fence < 2**53


# A claim whose reply never came is released, and may arrive after that.


class Cancelling(Contract):
    """The sender of a released token has gone. A grant to it would block the key until its lease expires."""

    def test_a_claim_that_comes_after_its_release_is_not_granted(self, kit: Kit) -> None:
        """The key stays free for the next request."""
        key, token = a_key(), a_token()
        kit.store.release(key, token)

        with pytest.raises(StoreUnavailable):
            kit.ask(key, token=token)

        assert kit.store.read(key) is None
        assert kit.granted(key).attempt == 1

    @for_each("times", (1, 2))
    def test_a_claim_that_comes_once_more_after_its_release_is_not_granted(self, kit: Kit, times: int) -> None:
        """Also if the release was sent twice: a client without a reply repeats it."""
        key, token = kit.begin()
        for _ in range(times):
            kit.store.release(key, token)

        with pytest.raises(StoreUnavailable):
            kit.ask(key, token=token)

        assert kit.store.read(key) is None
        kit.granted(key)

    def test_a_claim_that_was_given_up_learns_what_others_do(self, kit: Kit) -> None:
        """The store refuses it as any other claim, and returns the state of the key."""
        key, token, others = a_key(), a_token(), a_token()
        kit.store.release(key, token)
        kit.granted(key, token=others)

        assert isinstance(kit.ask(key, token=token), InFlight)
        kit.store.complete(key, others, PAYLOAD, keep=KEEP)
        assert isinstance(kit.ask(key, token=token), Record)


# That a token which is no longer the record's cannot write.

Write = Callable[[Kit, StorageKey, bytes], None]


def _renew(kit: Kit, key: StorageKey, token: bytes) -> None:
    kit.store.renew(key, token, lease=600)


def _mark(kit: Kit, key: StorageKey, token: bytes) -> None:
    kit.store.mark_point_of_no_return(key, token)


def _complete(kit: Kit, key: StorageKey, token: bytes) -> None:
    kit.store.complete(key, token, OTHER_PAYLOAD, keep=2 * KEEP)


def _release(kit: Kit, key: StorageKey, token: bytes) -> None:
    kit.store.release(key, token)


def _hold(kit: Kit, key: StorageKey, token: bytes) -> None:
    kit.store.quarantine(key, token, "stale")


WRITES = (_renew, _mark, _complete, _release, _hold)
every_write: Callable[[Callable[..., None]], Callable[..., None]] = for_each(
    "write", WRITES, ids=[write.__name__[1:] for write in WRITES]
)


class Ownership(Contract):
    """Every write after the claim carries its token, and only the record's own token writes."""

    @every_write
    @for_each("standing", ("in flight", "completed", "quarantined"))
    def test_a_stale_token_changes_nothing(self, kit: Kit, write: Write, standing: Standing) -> None:
        """The owner's record is unchanged, and the stale worker gets `LeaseLost`."""
        key, stale = kit.placed("in flight")
        kit.store.release(key, stale)
        kit.stand(key, standing)
        before = kit.found(key)

        assert lost(lambda: write(kit, key, stale))

        assert before == kit.found(key)

    @every_write
    def test_a_token_that_was_taken_over_changes_nothing(self, kit: Kit, write: Write) -> None:
        """A worker that stalls past its lease cannot touch its successor's record."""
        key, slow = kit.placed("lapsed, takeover")
        kit.granted(key)
        before = kit.found(key)

        assert lost(lambda: write(kit, key, slow))

        assert before == kit.found(key)

    @every_write
    def test_a_token_that_never_owned_changes_nothing(self, kit: Kit, write: Write) -> None:
        """Not even on a record whose lease is over: it must be claimed first."""
        key, _ = kit.placed("lapsed, takeover")
        before = kit.found(key)

        assert lost(lambda: write(kit, key, a_token()))

        assert before == kit.found(key)

    @for_each(
        "write", (_renew, _mark, _complete, _hold), ids=("renew", "mark_point_of_no_return", "complete", "quarantine")
    )
    def test_a_released_key_takes_no_writes(self, kit: Kit, write: Write) -> None:
        """An absent record has no owner, and no write restores it."""
        key, former = kit.placed("in flight")
        kit.store.release(key, former)

        assert lost(lambda: write(kit, key, former))

        assert kit.store.read(key) is None

    @every_write
    def test_a_former_owner_is_not_mistaken_for_the_present_one(self, kit: Kit, write: Write) -> None:
        """
        A stalls, B takes over and releases, C claims: the key looks as it did when A left it. A's write is refused and
        C's response stays.
        """
        key, first = kit.placed("lapsed, takeover")
        second, third = a_token(), a_token()
        kit.granted(key, on_expiry=OnExpiry.TAKEOVER, token=second)
        kit.store.release(key, second)
        kit.granted(key, on_expiry=OnExpiry.TAKEOVER, token=third)

        assert lost(lambda: write(kit, key, first))
        kit.store.complete(key, third, PAYLOAD, keep=KEEP)

        outcome = kit.ask(key)
        assert isinstance(outcome, Record)
        assert (third, PAYLOAD) == (outcome.token, outcome.payload)

    def test_the_late_finisher_is_fenced_off(self, kit: Kit) -> None:
        """The store keeps the response of the attempt that owns the key, whichever is ready first."""
        key, slow = kit.placed("lapsed, takeover")
        fast = a_token()
        kit.granted(key, token=fast)
        kit.store.complete(key, fast, PAYLOAD, keep=KEEP)

        assert lost(lambda: kit.store.complete(key, slow, OTHER_PAYLOAD, keep=KEEP))

        assert (kit.found(key).state, kit.found(key).payload) == (State.COMPLETED, PAYLOAD)
