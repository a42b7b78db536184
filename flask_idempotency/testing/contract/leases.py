"""Contract of time: expiry of leases and responses, renewal, and the point of no return."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flask_idempotency.engine.model import InFlight, OnExpiry, Record, RequestInfo, State, Unknown
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    LONG,
    OTHER_FINGERPRINT,
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


class Retention:
    """Only a COMPLETED record expires, by the store's clock."""

    def test_an_expired_record_is_absent(self, store: Store, clock: FrozenClock) -> None:
        """Whether or not the store has swept it: for `read`, and for a claim by any request."""
        key, _ = placed(store, clock, "completed")
        clock.advance(KEEP)

        assert store.read(key) is None
        grant = granted(store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE))
        assert grant.attempt == 1
        assert (found(store, key).state, found(store, key).payload) == (State.PROCESSING, None)

    def test_an_answer_is_kept_to_its_last_moment(self, store: Store, clock: FrozenClock) -> None:
        """As long as was promised, not about as long."""
        key, _ = placed(store, clock, "completed")
        clock.advance(KEEP - 0.125)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    def test_replaying_does_not_lengthen_an_answers_life(self, store: Store, clock: FrozenClock) -> None:
        """It expires at the promised time, however often it is read."""
        key, _ = placed(store, clock, "completed")
        clock.advance(KEEP / 2)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        store.read(key)
        clock.advance(KEEP / 2)

        assert store.read(key) is None

    def test_the_former_owner_of_an_expired_record_owns_no_record(self, store: Store, clock: FrozenClock) -> None:
        """For writes, an expired record is absent: no write restores it, and releasing it does nothing."""
        key, token = placed(store, clock, "completed")
        clock.advance(KEEP + 1)

        assert lost(lambda: store.complete(key, token, PAYLOAD, keep=KEEP))
        assert lost(lambda: store.renew(key, token, lease=LEASE))
        assert lost(lambda: store.mark_point_of_no_return(key, token))
        assert lost(lambda: store.quarantine(key, token, "late"))
        store.release(key, token)

        assert store.read(key) is None

    def test_a_claim_in_progress_never_expires(self, store: Store, clock: FrozenClock) -> None:
        """A record that vanished by itself would be a silent release: the payment would run again."""
        key, _ = placed(store, clock, "in flight")
        clock.advance(LONG)

        assert State.PROCESSING is found(store, key).state
        assert Unknown("lease-expired") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_quarantined_record_never_expires(self, store: Store, clock: FrozenClock) -> None:
        """It waits for an operator or a resolver."""
        key, _ = placed(store, clock, "quarantined")
        clock.advance(LONG)

        assert Unknown("view-crashed") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_quarantined_record_does_not_inherit_an_expiry(self, store: Store, clock: FrozenClock) -> None:
        """A key that is used again must not keep the expiry of its first response."""
        key, _ = placed(store, clock, "completed")
        clock.advance(KEEP)
        stand(store, clock, key, "quarantined")
        clock.advance(LONG)

        assert State.QUARANTINED is found(store, key).state


class LeaseExpiry:
    """The record's `on_expiry` decides what an expired lease means. Only its owner renews and marks it."""

    @for_each("asked", list(OnExpiry))
    def test_an_expired_claim_is_quarantined(self, store: Store, clock: FrozenClock, asked: OnExpiry) -> None:
        """
        The work of its owner is unknown. The rule in the record decides: a retry from a newer release, with
        another policy, does not change what the first request was promised.
        """
        key, token = placed(store, clock, "lapsed, quarantine")
        before = found(store, key)

        outcome = store.claim(a_request(key, on_expiry=asked), token=a_token(), lease=LEASE)

        record = found(store, key)
        assert Unknown("lease-expired") == outcome
        assert (record.state, record.reason) == (State.QUARANTINED, "lease-expired")
        assert (token, before.fence, before.deadline) == (record.token, record.fence, record.deadline)

    @for_each("asked", list(OnExpiry))
    def test_an_expired_claim_is_taken_over(self, store: Store, clock: FrozenClock, asked: OnExpiry) -> None:
        """
        As the next attempt, with a higher fence. What may happen to the new attempt is for the new owner to say; when
        the key was first used is not.
        """
        key, token = a_key(), a_token()
        stand(store, clock, key, "lapsed, takeover")
        before = found(store, key)
        retry = a_request(key, on_expiry=asked, about=RequestInfo(principal="alice", operation="payments.v2"))

        grant = granted(store.claim(retry, token=token, lease=2 * LEASE))

        record = found(store, key)
        assert (2, near(2 * LEASE)) == (grant.attempt, grant.lease)
        assert grant.fence > before.fence
        assert (token, grant.fence, 2) == (record.token, record.fence, record.attempt)
        assert (State.PROCESSING, asked, retry.info) == (record.state, record.on_expiry, record.info)
        assert (before.requested_at, near(clock.now + 2 * LEASE)) == (record.requested_at, record.deadline)

    def test_the_lease_ends_at_its_deadline(self, store: Store, clock: FrozenClock) -> None:
        """Not yet a moment before, over at that moment."""
        key, _ = placed(store, clock, "in flight")
        clock.advance(LEASE - 0.125)
        assert InFlight(near(0.125)) == store.claim(a_request(key), token=a_token(), lease=LEASE)
        clock.advance(0.125)

        assert Unknown("lease-expired") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_looking_does_not_end_a_lease(self, store: Store, clock: FrozenClock) -> None:
        """`read` returns a record with an expired lease as PROCESSING, because it never writes."""
        key, _ = placed(store, clock, "lapsed, quarantine")

        first, second = found(store, key), found(store, key)

        assert (State.PROCESSING, near(-1)) == (first.state, first.remaining)
        assert first == second

    def test_a_renewed_lease_is_longer(self, store: Store, clock: FrozenClock) -> None:
        """The full lease from now; with it the key stays taken past the first deadline."""
        key, token = placed(store, clock, "in flight")
        clock.advance(LEASE - 10)

        store.renew(key, token, lease=LEASE)
        clock.advance(LEASE - 1)

        assert InFlight(near(1)) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_renewal_never_shortens(self, store: Store, clock: FrozenClock) -> None:
        """Two renewals may arrive in the wrong order, and the clock may have been set back in between."""
        key, token = placed(store, clock, "in flight")
        before = found(store, key).deadline

        store.renew(key, token, lease=LEASE - 20)
        clock.advance(-3600)
        store.renew(key, token, lease=LEASE)

        assert before == found(store, key).deadline

    def test_a_renewal_changes_nothing_else(self, store: Store, clock: FrozenClock) -> None:
        """Twice is once."""
        key, token = placed(store, clock, "in flight")
        before = found(store, key)
        clock.advance(10)

        store.renew(key, token, lease=LEASE)
        once = found(store, key)
        store.renew(key, token, lease=LEASE)

        assert once == found(store, key)
        assert (before.token, before.fence, before.attempt) == (once.token, once.fence, once.attempt)
        assert (before.requested_at, before.info) == (once.requested_at, once.info)

    def test_an_expired_lease_can_be_renewed(self, store: Store, clock: FrozenClock) -> None:
        """The owner renews late, before another worker noticed: it continues, and a duplicate is in flight again."""
        key, token = placed(store, clock, "lapsed, takeover")

        store.renew(key, token, lease=LEASE)

        assert InFlight(near(LEASE)) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    @for_each("standing", ("quarantined", "completed"))
    def test_what_need_not_be_renewed_is_left_alone(self, store: Store, clock: FrozenClock, standing: Standing) -> None:
        """The renewal thread may be one step behind its worker. That is no error, and does not undo the quarantine."""
        key, token = placed(store, clock, standing)
        before = found(store, key)

        store.renew(key, token, lease=10 * LEASE)

        assert before == found(store, key)

    def test_a_quarantined_owner_can_still_renew(self, store: Store, clock: FrozenClock) -> None:
        """A resolver sees the lease. The record stays quarantined, and only its lease changes."""
        key, token = placed(store, clock, "lapsed, quarantine")
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        before = found(store, key)

        store.renew(key, token, lease=LEASE)

        assert before.state is State.QUARANTINED
        after = found(store, key)
        assert (near(clock.now + LEASE), near(LEASE)) == (after.deadline, after.remaining)
        assert before == replace(after, deadline=before.deadline, remaining=before.remaining)
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Unknown)

    @for_each("lease", (0.0, -1.0, math.inf, math.nan))
    def test_a_renewal_without_an_end_is_refused(self, store: Store, clock: FrozenClock, lease: float) -> None:
        """As a claim is."""
        key, token = placed(store, clock, "in flight")

        with pytest.raises(ValueError, match="duration"):
            store.renew(key, token, lease=lease)

    def test_a_marked_record_is_never_taken_over(self, store: Store, clock: FrozenClock) -> None:
        """Past the point of no return, only its owner or an operator can know the outcome."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
        store.mark_point_of_no_return(key, token)
        clock.advance(LEASE + 1)

        outcome = store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)

        assert Unknown("lease-expired") == outcome

    def test_marking_changes_nothing_else(self, store: Store, clock: FrozenClock) -> None:
        """The lease is neither shortened nor lengthened, and twice is once."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
        before = found(store, key)

        store.mark_point_of_no_return(key, token)
        once = found(store, key)
        store.mark_point_of_no_return(key, token)

        assert OnExpiry.QUARANTINE is once.on_expiry
        assert (before.state, before.deadline, before.fence) == (once.state, once.deadline, once.fence)
        assert once == found(store, key)

    def test_marking_after_the_lease_works_until_another_worker_takes_over(
        self, store: Store, clock: FrozenClock
    ) -> None:
        """The owner may continue, because no other worker can run the view now."""
        key, token = placed(store, clock, "lapsed, takeover")

        store.mark_point_of_no_return(key, token)

        assert Unknown("lease-expired") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_marking_after_a_takeover_is_refused(self, store: Store, clock: FrozenClock) -> None:
        """This is what keeps a worker that stalled just before its effect from having it beside its successor's."""
        key, token = placed(store, clock, "lapsed, takeover")
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE))

        assert lost(lambda: store.mark_point_of_no_return(key, token))

        assert OnExpiry.TAKEOVER is found(store, key).on_expiry

    def test_marking_what_is_quarantined_changes_nothing(self, store: Store) -> None:
        """It will not be taken over: what marking promises holds already."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
        store.quarantine(key, token, "view-crashed")
        before = found(store, key)

        store.mark_point_of_no_return(key, token)

        assert before == found(store, key)

    def test_a_mismatch_returns_when_the_key_was_first_used(self, store: Store, clock: FrozenClock) -> None:
        """Over take-overs too."""
        key = a_key()
        used_at = clock.now
        stand(store, clock, key, "lapsed, takeover")
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

        outcome = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)

        assert near(used_at) == getattr(outcome, "first_seen", None)
