"""Contract of `claim`: free keys, duplicates, cancelled claims, fencing and ownership."""

from __future__ import annotations

import math
from functools import partial

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
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
    PAYLOAD,
    STANDINGS,
    Contract,
    Kit,
    Standing,
    a_token,
    for_each,
    granted,
    near,
)

# The states of a record in which the store refuses a claim without a write.
REFUSING = ("in flight", "completed", "quarantined")


class Claiming(Contract):
    """`claim` checks a key in a fixed order, and a refused claim changes no record."""

    @for_each("on_expiry", list(OnExpiry))
    def test_a_free_key_is_granted(self, kit: Kit, on_expiry: OnExpiry) -> None:
        """As attempt 1, for the requested lease. Its record holds all of the claim, and a deadline on the store's clock."""
        key, token = kit.key(), a_token()
        assert kit.store.read(key) is None
        grant = kit.granted(key, on_expiry=on_expiry, token=token)

        record = kit.found(key)

        assert (token, 1, near(LEASE)) == (grant.token, grant.attempt, grant.lease)
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
        key, token = kit.key(), a_token()
        kit.ask(key, about=about, token=token)
        before = kit.found(key).info
        kit.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (about, about) == (before, kit.found(key).info)

    def test_keys_do_not_touch_each_other(self, kit: Kit) -> None:
        """Another key of the same tenant, and one of another tenant, are free and stay as they were."""
        key, _ = kit.begin()
        with kit.unchanged(key):
            for neighbour in (kit.key(key.tid), kit.key()):
                kit.complete(neighbour)

    def test_the_same_token_is_granted_again(self, kit: Kit) -> None:
        """
        A claim whose reply was lost is repeated, by client libraries without the caller's knowledge. It must not be told
        that the key is taken: it was taken by itself. Nothing is gained by it either, such as a longer lease.
        """
        key, token = kit.key(), a_token()
        first = kit.granted(key, token=token)
        before = kit.found(key)
        kit.advance(10)

        again = kit.granted(key, token=token)

        assert (first.fence, 1, near(LEASE - 10)) == (again.fence, again.attempt, again.lease)
        assert before.deadline == kit.found(key).deadline

    @for_each("on_expiry", list(OnExpiry))
    def test_the_same_token_is_granted_again_after_its_lease(self, kit: Kit, on_expiry: OnExpiry) -> None:
        """The lease limits what other workers may do, and none has acted."""
        key, token = kit.key(), a_token()
        first = kit.granted(key, on_expiry=on_expiry, token=token)
        kit.advance(LEASE + 1)

        again = kit.granted(key, on_expiry=on_expiry, token=token)

        assert (first.fence, 1, 0.0) == (again.fence, again.attempt, again.lease)

    def test_a_taken_key_is_in_flight(self, kit: Kit) -> None:
        """The duplicate gets the seconds that are left of the worker's lease."""
        key, _ = kit.placed("in flight")
        kit.advance(12)

        assert InFlight(near(LEASE - 12)) == kit.ask(key, lease=600)

    @for_each("standing", REFUSING)
    @for_each("fingerprint", (FINGERPRINT, OTHER_FINGERPRINT), ids=("same", "other"))
    def test_refusal_changes_nothing(self, kit: Kit, standing: Standing, fingerprint: bytes) -> None:
        """
        A refused duplicate leaves no trace, and a third caller is refused like the second. Stores have deleted the
        owner's record on behalf of a caller that they had just turned away.
        """
        key, _ = kit.placed(standing)
        mallory = RequestInfo(principal="mallory")
        ask = partial(kit.ask, key, lease=600, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, about=mallory)

        with kit.unchanged(key):
            second, third = ask(), ask()

            assert second == third
            assert isinstance(second, InFlight | Record | Unknown | Mismatched)

    @for_each("standing", REFUSING)
    def test_a_refused_token_owns_nothing(self, kit: Kit, standing: Standing) -> None:
        """A refused claim does not turn into a granted one when it is repeated."""
        key, _ = kit.placed(standing)
        refused = a_token()
        first = kit.ask(key, token=refused)

        assert first == kit.ask(key, token=refused)

    @for_each("standing", STANDINGS)
    def test_another_request_is_a_mismatch_before_anything_else(self, kit: Kit, standing: Standing) -> None:
        """
        A key used for something else is said to be so at once, also while the first use is running or is lost: a 409
        would invite a retry that can never succeed. Nothing changes, and a lapsed record stays lapsed.
        """
        used_at = kit.now
        key, _ = kit.placed(standing)
        with kit.unchanged(key):
            outcome = kit.ask(key, fingerprint=OTHER_FINGERPRINT)

            assert Mismatched(first_seen=near(used_at)) == outcome

    def test_the_owners_own_token_with_another_request_is_a_mismatch(self, kit: Kit) -> None:
        """The fingerprint is looked at before the token."""
        key, token = kit.begin()

        outcome = kit.ask(key, fingerprint=OTHER_FINGERPRINT, token=token)

        assert isinstance(outcome, Mismatched)

    @for_each("standing", STANDINGS)
    def test_a_record_of_another_caller_is_left_alone(self, kit: Kit, standing: Standing) -> None:
        """
        Several callers may have had the name of this key. What one of them made there is no business of another: it is
        neither replayed nor taken over nor quarantined, whether or not the requests are the same.
        """
        used_at = kit.now
        key, _ = kit.placed(standing)
        # Spelled alike, one after the other, and each the beginning of the record's.
        others = Callers(frozenset({("acme", "bob"), ("acmea", "lice"), ("acme", "alic"), ("", ""), ("alice", "acme")}))

        with kit.unchanged(key):
            for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
                outcome = kit.ask(key, fingerprint=fingerprint, on_expiry=OnExpiry.TAKEOVER, callers=others)
                assert OtherCaller(first_seen=near(used_at)) == outcome

    @for_each("standing", STANDINGS)
    def test_a_record_that_shows_no_caller_is_not_taken_over(self, kit: Kit, standing: Standing) -> None:
        """It may be anyone's. It keeps others out and is replayed as before, but no claim takes it over."""
        key, _ = kit.placed(standing)
        unnamed = Callers(frozenset({("acme", "bob")}), frozenset({("acme", "alice")}))
        expected = {
            "in flight": InFlight(near(LEASE)),
            "completed": kit.found(key),
            "quarantined": Unknown("view-crashed"),
        }

        with kit.unchanged(key):
            outcome = kit.ask(key, on_expiry=OnExpiry.TAKEOVER, callers=unnamed)

            assert expected.get(standing, Unknown(CALLER_UNKNOWN)) == outcome

    @for_each("quota", (None, Quota(records=5)), ids=("no quota", "quota"))
    def test_a_record_of_the_caller_counts(self, kit: Kit, quota: Quota | None) -> None:
        """Whichever of its names the record has. A key without a record, or with an expired one, is free to everyone."""
        if quota is not None and not hasattr(kit.store, "ledger"):
            return
        key, first, second = kit.key(), a_token(), a_token()
        names = Callers(frozenset({("", "alice"), ("acme", "alice")}), frozenset({("", "")}), former=True)
        kit = Kit(kit.store, kit.clock, quota)
        ask = partial(kit.ask, key, on_expiry=OnExpiry.TAKEOVER, callers=names)

        assert [granted(ask(token=first)).attempt for _ in range(2)] == [1, 1]
        kit.advance(LEASE + 1)
        assert granted(ask(token=second)).attempt == 2
        kit.store.complete(key, second, PAYLOAD, keep=KEEP)
        assert isinstance(ask(), Record)
        kit.advance(2 * KEEP)
        assert kit.granted(key, callers=Callers(frozenset({("acme", "bob")}))).attempt == 1

    @for_each("seconds", (0.0, -1.0, math.inf, math.nan))
    def test_what_would_not_end_is_refused(self, kit: Kit, seconds: float) -> None:
        """A lease without a deadline could never expire; a response would be lost with 0, and not be stored with infinity."""
        free, (key, token) = kit.key(), kit.placed("in flight")
        before = kit.found(key)

        with pytest.raises(ValueError, match="duration"):
            kit.ask(free, lease=seconds)
        with pytest.raises(ValueError, match="duration"):
            kit.store.renew(key, token, lease=seconds)
        with pytest.raises(ValueError, match="duration"):
            kit.store.complete(key, token, PAYLOAD, keep=seconds)

        assert (None, before) == (kit.store.read(free), kit.found(key))


# That fences rise for ever.


class Fencing(Contract):
    """A later claim of a key has a higher fence, so that `WHERE fence <= :mine` keeps an earlier one out."""

    @for_each("ended", ("released", "released, clock set back", "expired", "taken over"))
    def test_the_next_fence_is_higher(self, kit: Kit, ended: str) -> None:
        """After every end of the last claim, and after every change of the clock."""
        key = kit.key()
        fences = []
        for _ in range(4):
            token = a_token()
            fences.append(kit.granted(key, token=token, on_expiry=OnExpiry.TAKEOVER).fence)
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
        key = kit.key()
        first = kit.granted(key, on_expiry=OnExpiry.TAKEOVER)
        kit.advance(-86400)
        refused = kit.ask(key)
        kit.advance(86400 + LEASE)

        assert getattr(refused, "retry_after", 0) > LEASE
        assert kit.granted(key).fence > first.fence

    def test_a_fence_is_a_positive_number_that_databases_can_hold(self, kit: Kit) -> None:
        """A signed 64-bit column, and a double without loss."""
        fence = kit.granted(kit.key()).fence

        assert 0 < fence < 2**53


# A claim whose reply never came is released, and may arrive after that.


class Cancelling(Contract):
    """The sender of a released token has gone. A grant to it would block the key until its lease expires."""

    def test_a_claim_that_comes_after_its_release_is_not_granted(self, kit: Kit) -> None:
        """The key stays free for the next request."""
        key, token = kit.key(), a_token()
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
        key, token, others = kit.key(), a_token(), a_token()
        kit.store.release(key, token)
        kit.granted(key, token=others)

        assert isinstance(kit.ask(key, token=token), InFlight)
        kit.store.complete(key, others, PAYLOAD, keep=KEEP)
        assert isinstance(kit.ask(key, token=token), Record)


# That a token which is no longer the record's cannot write.


class Ownership(Contract):
    """Every write after the claim carries its token, and only the record's own token writes."""

    @for_each("standing", ("in flight", "completed", "quarantined"))
    def test_a_stale_token_changes_nothing(self, kit: Kit, standing: Standing) -> None:
        """The owner's record is unchanged, and the stale worker gets `LeaseLost`."""
        key, stale = kit.placed("in flight")
        kit.store.release(key, stale)
        kit.stand(key, standing)
        with kit.unchanged(key):
            assert kit.accepted(key, stale) == []

    def test_a_token_that_was_taken_over_changes_nothing(self, kit: Kit) -> None:
        """A worker that stalls past its lease cannot touch its successor's record."""
        key, slow = kit.placed("lapsed, takeover")
        kit.granted(key)
        with kit.unchanged(key):
            assert kit.accepted(key, slow) == []

    def test_a_token_that_never_owned_changes_nothing(self, kit: Kit) -> None:
        """Not even on a record whose lease is over: it must be claimed first."""
        key, _ = kit.placed("lapsed, takeover")
        with kit.unchanged(key):
            assert kit.accepted(key, a_token()) == []

    def test_a_released_key_takes_no_writes(self, kit: Kit) -> None:
        """An absent record has no owner, and no write restores it. A repeated release has nothing to do."""
        key, former = kit.placed("in flight")
        kit.store.release(key, former)

        assert kit.accepted(key, former) == ["release"]

        assert kit.store.read(key) is None

    def test_a_former_owner_is_not_mistaken_for_the_present_one(self, kit: Kit) -> None:
        """
        A stalls, B takes over and releases, C claims: the key looks as it did when A left it. A's write is refused and
        C's response stays.
        """
        key, first = kit.placed("lapsed, takeover")
        second, third = a_token(), a_token()
        kit.granted(key, on_expiry=OnExpiry.TAKEOVER, token=second)
        kit.store.release(key, second)
        kit.granted(key, on_expiry=OnExpiry.TAKEOVER, token=third)

        assert kit.accepted(key, first) == []
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

        assert kit.accepted(key, slow, "complete") == []

        assert (kit.found(key).state, kit.found(key).payload) == (State.COMPLETED, PAYLOAD)
