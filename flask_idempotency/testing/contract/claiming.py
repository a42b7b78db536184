"""Who gets a key, and what the others are told."""

from __future__ import annotations

import math

import pytest

from flask_idempotency.engine.model import About, InFlight, Mismatched, OnLapse, Replayed, State, Unknown
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    near,
    stand,
)

# What a record may stand at while a claim of it is refused without a word being written.
REFUSING = ("in flight", "completed", "quarantined")
EVERY_STANDING = (*REFUSING, "lapsed, takeover", "lapsed, quarantine")


class Claiming:
    """The order in which `claim` looks at a key, and that looking changes nothing."""

    def test_a_free_key_is_granted(self, store: Store) -> None:
        """The first to ask gets the key, as attempt 1, for the lease that it asked for."""
        token = a_token()

        grant = granted(store.claim(a_request(a_key()), token=token, lease=LEASE))

        assert (token, 1, near(LEASE)) == (grant.token, grant.attempt, grant.lease)

    @pytest.mark.parametrize("on_lapse", list(OnLapse))
    def test_a_granted_claim_can_be_read(self, store: Store, clock: FrozenClock, on_lapse: OnLapse) -> None:
        """Everything the record was given, and a deadline on the store's clock."""
        key, token = a_key(), a_token()
        grant = granted(store.claim(a_request(key, on_lapse=on_lapse), token=token, lease=LEASE))

        record = found(store, key)

        assert (State.PROCESSING, token, grant.fence, 1) == (record.state, record.token, record.fence, record.attempt)
        assert (FINGERPRINT, on_lapse, ABOUT) == (record.fingerprint, record.on_lapse, record.about)
        assert (near(clock.now), near(clock.now + LEASE)) == (record.requested_at, record.deadline)
        assert (near(LEASE), None, None, "") == (record.remaining, record.completed_at, record.payload, record.reason)

    @pytest.mark.parametrize(
        "about",
        (
            About(),
            About(tenant="", principal="alice", method="", operation="x"),
            About(tenant="a\0b", principal="{x}:*\r\n", method="Ü", operation="日本語 🦊"),
            About(tenant="\udc80", principal="p" * 10_000, method="PATCH", operation="o" * 300),
        ),
        ids=("empty", "partly", "hostile", "long"),
    )
    def test_what_an_auditor_is_told_survives(self, store: Store, about: About) -> None:
        """Tenants and principals are the application's own text, whatever it contains, before and after completion."""
        key, token = a_key(), a_token()
        store.claim(a_request(key, about=about), token=token, lease=LEASE)
        before = found(store, key).about
        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (about, about) == (before, found(store, key).about)

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
        A claim whose reply was lost is repeated, by client libraries without anybody's knowledge. It must not be told
        that the key is taken: it was taken by itself. Nothing is gained by it either, such as a longer lease.
        """
        key, token = a_key(), a_token()
        first = granted(store.claim(a_request(key), token=token, lease=LEASE))
        before = found(store, key)
        clock.advance(10)

        again = granted(store.claim(a_request(key), token=token, lease=LEASE))

        assert (first.fence, 1, near(LEASE - 10)) == (again.fence, again.attempt, again.lease)
        assert before.deadline == found(store, key).deadline

    @pytest.mark.parametrize("on_lapse", list(OnLapse))
    def test_the_same_token_is_granted_again_after_its_lease(
        self, store: Store, clock: FrozenClock, on_lapse: OnLapse
    ) -> None:
        """The lease gates only what others may do; nobody has done anything."""
        key, token = a_key(), a_token()
        first = granted(store.claim(a_request(key, on_lapse=on_lapse), token=token, lease=LEASE))
        clock.advance(LEASE + 1)

        again = granted(store.claim(a_request(key, on_lapse=on_lapse), token=token, lease=LEASE))

        assert (first.fence, 1, 0.0) == (again.fence, again.attempt, again.lease)

    def test_a_taken_key_is_in_flight(self, store: Store, clock: FrozenClock) -> None:
        """The duplicate is told how much of the owner's lease is left."""
        key = a_key()
        stand(store, clock, key, "in flight")
        clock.advance(12)

        assert InFlight(near(LEASE - 12)) == store.claim(a_request(key), token=a_token(), lease=600)

    def test_a_completed_key_is_replayed(self, store: Store, clock: FrozenClock) -> None:
        """The answer is the record as `read` tells it."""
        key = a_key()
        stand(store, clock, key, "completed")

        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)

        assert Replayed(found(store, key)) == outcome

    def test_a_quarantined_key_is_unknown(self, store: Store, clock: FrozenClock) -> None:
        """Whoever asks hears why."""
        key = a_key()
        stand(store, clock, key, "quarantined")

        assert Unknown("view-crashed") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    @pytest.mark.parametrize("standing", REFUSING)
    @pytest.mark.parametrize("fingerprint", (FINGERPRINT, OTHER_FINGERPRINT), ids=("same", "other"))
    def test_refusal_changes_nothing(
        self, store: Store, clock: FrozenClock, standing: Standing, fingerprint: bytes
    ) -> None:
        """
        A refused duplicate leaves no trace, and a third caller is refused like the second. Stores have deleted the
        owner's record on behalf of a caller that they had just turned away.
        """
        key = a_key()
        stand(store, clock, key, standing)
        before = found(store, key)
        ask = a_request(key, fingerprint=fingerprint, on_lapse=OnLapse.TAKEOVER, about=About(principal="mallory"))

        second = store.claim(ask, token=a_token(), lease=600)
        third = store.claim(ask, token=a_token(), lease=600)

        assert second == third
        assert isinstance(second, InFlight | Replayed | Unknown | Mismatched)
        assert before == found(store, key)

    @pytest.mark.parametrize("standing", REFUSING)
    def test_a_refused_token_owns_nothing(self, store: Store, clock: FrozenClock, standing: Standing) -> None:
        """A refused claim does not turn into a granted one when it is repeated."""
        key = a_key()
        stand(store, clock, key, standing)
        refused = a_token()
        first = store.claim(a_request(key), token=refused, lease=LEASE)

        assert first == store.claim(a_request(key), token=refused, lease=LEASE)

    @pytest.mark.parametrize("standing", EVERY_STANDING)
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

    @pytest.mark.parametrize("lease", (0.0, -1.0, math.inf, math.nan))
    def test_a_claim_without_an_end_is_refused(self, store: Store, lease: float) -> None:
        """A record without a deadline cannot exist: it could be taken by anybody or by nobody."""
        key = a_key()

        with pytest.raises(ValueError, match="duration"):
            store.claim(a_request(key), token=a_token(), lease=lease)

        assert store.read(key) is None
