"""Contract of time: expiry of leases and responses, renewal, and the point of no return."""

from __future__ import annotations

from dataclasses import replace

from flask_idempotency.engine.model import InFlight, OnExpiry, Record, RequestInfo, State, Unknown
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    LONG,
    OTHER_FINGERPRINT,
    Contract,
    Kit,
    Standing,
    a_token,
    for_each,
    near,
)


class Retention(Contract):
    """Only a COMPLETED record expires, by the store's clock."""

    def test_an_expired_record_is_absent(self, kit: Kit) -> None:
        """Whether or not the store has swept it: for `read`, and for a claim by any request."""
        key, _ = kit.placed("completed")
        kit.advance(KEEP)

        assert kit.store.read(key) is None
        grant = kit.granted(key, fingerprint=OTHER_FINGERPRINT)
        assert grant.attempt == 1
        assert (kit.found(key).state, kit.found(key).payload) == (State.PROCESSING, None)

    def test_an_answer_is_kept_to_its_last_moment(self, kit: Kit) -> None:
        """As long as was promised, however often it is read, and not about as long."""
        key, _ = kit.placed("completed")
        kit.advance(KEEP - 0.125)
        assert isinstance(kit.ask(key), Record)
        assert kit.store.read(key) is not None
        kit.advance(0.125)

        assert kit.store.read(key) is None

    def test_the_former_owner_of_an_expired_record_owns_no_record(self, kit: Kit) -> None:
        """For writes, an expired record is absent: no write restores it, and releasing it does nothing."""
        key, token = kit.placed("completed")
        kit.advance(KEEP + 1)

        assert kit.accepted(key, token) == ["release"]
        assert kit.store.read(key) is None

    def test_a_claim_in_progress_never_expires(self, kit: Kit) -> None:
        """A record that vanished by itself would be a silent release: the payment would run again."""
        key, _ = kit.placed("in flight")
        kit.advance(LONG)

        assert State.PROCESSING is kit.found(key).state
        assert Unknown("lease-expired") == kit.ask(key)

    def test_a_quarantined_record_never_expires(self, kit: Kit) -> None:
        """It waits for an operator or a resolver."""
        key, _ = kit.placed("quarantined")
        kit.advance(LONG)

        assert Unknown("view-crashed") == kit.ask(key)

    def test_a_quarantined_record_does_not_inherit_an_expiry(self, kit: Kit) -> None:
        """A key that is used again must not keep the expiry of its first response."""
        key, _ = kit.placed("completed")
        kit.advance(KEEP)
        kit.stand(key, "quarantined")
        kit.advance(LONG)

        assert State.QUARANTINED is kit.found(key).state


class LeaseExpiry(Contract):
    """The record's `on_expiry` decides what an expired lease means. Only its owner renews and marks it."""

    @for_each("asked", list(OnExpiry))
    def test_an_expired_claim_is_quarantined(self, kit: Kit, asked: OnExpiry) -> None:
        """
        The work of its owner is unknown. The rule in the record decides: a retry from a newer release, with
        another policy, does not change what the first request was promised.
        """
        key, token = kit.placed("lapsed, quarantine")
        before = kit.found(key)

        outcome = kit.ask(key, on_expiry=asked)

        record = kit.found(key)
        assert Unknown("lease-expired") == outcome
        assert (record.state, record.reason) == (State.QUARANTINED, "lease-expired")
        assert (token, before.fence, before.deadline) == (record.token, record.fence, record.deadline)

    @for_each("asked", list(OnExpiry))
    def test_an_expired_claim_is_taken_over(self, kit: Kit, asked: OnExpiry) -> None:
        """
        As the next attempt, with a higher fence. What may happen to the new attempt is for the new owner to say; when
        the key was first used is not.
        """
        key, token = kit.key(), a_token()
        kit.stand(key, "lapsed, takeover")
        before = kit.found(key)
        about = RequestInfo(principal="alice", operation="payments.v2")

        grant = kit.granted(key, token=token, lease=2 * LEASE, on_expiry=asked, about=about)

        record = kit.found(key)
        assert (2, near(2 * LEASE)) == (grant.attempt, grant.lease)
        assert grant.fence > before.fence
        assert (token, grant.fence, 2) == (record.token, record.fence, record.attempt)
        assert (State.PROCESSING, asked, about) == (record.state, record.on_expiry, record.info)
        assert (before.requested_at, near(kit.now + 2 * LEASE)) == (record.requested_at, record.deadline)

    def test_the_lease_ends_at_its_deadline(self, kit: Kit) -> None:
        """Not yet a moment before, over at that moment."""
        key, _ = kit.placed("in flight")
        kit.advance(LEASE - 0.125)
        assert InFlight(near(0.125)) == kit.ask(key)
        kit.advance(0.125)

        assert Unknown("lease-expired") == kit.ask(key)

    def test_looking_does_not_end_a_lease(self, kit: Kit) -> None:
        """`read` returns a record with an expired lease as PROCESSING, because it never writes."""
        key, _ = kit.placed("lapsed, quarantine")

        first, second = kit.found(key), kit.found(key)

        assert (State.PROCESSING, near(-1)) == (first.state, first.remaining)
        assert first == second

    def test_a_renewed_lease_is_longer(self, kit: Kit) -> None:
        """The full lease from now; with it the key stays taken past the first deadline."""
        key, token = kit.placed("in flight")
        kit.advance(LEASE - 10)

        kit.store.renew(key, token, lease=LEASE)
        kit.advance(LEASE - 1)

        assert InFlight(near(1)) == kit.ask(key)

    def test_a_renewal_never_shortens(self, kit: Kit) -> None:
        """Two renewals may arrive in the wrong order, and the clock may have been set back in between."""
        key, token = kit.placed("in flight")
        before = kit.found(key).deadline

        kit.store.renew(key, token, lease=LEASE - 20)
        kit.advance(-3600)
        kit.store.renew(key, token, lease=LEASE)

        assert before == kit.found(key).deadline

    def test_a_renewal_changes_nothing_else(self, kit: Kit) -> None:
        """Twice is once."""
        key, token = kit.placed("in flight")
        before = kit.found(key)
        kit.advance(10)

        kit.store.renew(key, token, lease=LEASE)
        once = kit.found(key)
        kit.store.renew(key, token, lease=LEASE)

        assert once == kit.found(key)
        assert (before.token, before.fence, before.attempt) == (once.token, once.fence, once.attempt)
        assert (before.requested_at, before.info) == (once.requested_at, once.info)

    def test_an_expired_lease_can_be_renewed(self, kit: Kit) -> None:
        """The owner renews late, before another worker noticed: it continues, and a duplicate is in flight again."""
        key, token = kit.placed("lapsed, takeover")

        kit.store.renew(key, token, lease=LEASE)

        assert InFlight(near(LEASE)) == kit.ask(key)

    @for_each("standing", ("quarantined", "completed"))
    def test_what_need_not_be_renewed_is_left_alone(self, kit: Kit, standing: Standing) -> None:
        """The renewal thread may be one step behind its worker. That is no error, and does not undo the quarantine."""
        key, token = kit.placed(standing)
        with kit.unchanged(key):
            kit.store.renew(key, token, lease=10 * LEASE)

    def test_a_quarantined_owner_can_still_renew(self, kit: Kit) -> None:
        """A resolver sees the lease. The record stays quarantined, and only its lease changes."""
        key, token = kit.placed("noticed")
        before = kit.found(key)

        kit.store.renew(key, token, lease=LEASE)

        after = kit.found(key)
        assert (near(kit.now + LEASE), near(LEASE)) == (after.deadline, after.remaining)
        assert before == replace(after, deadline=before.deadline, remaining=before.remaining)
        assert isinstance(kit.ask(key), Unknown)

    def test_a_marked_record_is_never_taken_over(self, kit: Kit) -> None:
        """Past the point of no return, only its owner or an operator can know the outcome."""
        key, token = kit.begin(on_expiry=OnExpiry.TAKEOVER)
        kit.store.mark_point_of_no_return(key, token)
        kit.advance(LEASE + 1)

        outcome = kit.ask(key, on_expiry=OnExpiry.TAKEOVER)

        assert Unknown("lease-expired") == outcome

    def test_marking_changes_nothing_else(self, kit: Kit) -> None:
        """The lease is neither shortened nor lengthened, and twice is once."""
        key, token = kit.begin(on_expiry=OnExpiry.TAKEOVER)
        before = kit.found(key)

        kit.store.mark_point_of_no_return(key, token)
        once = kit.found(key)
        kit.store.mark_point_of_no_return(key, token)

        assert OnExpiry.QUARANTINE is once.on_expiry
        assert (before.state, before.deadline, before.fence) == (once.state, once.deadline, once.fence)
        assert once == kit.found(key)

    def test_marking_after_the_lease_works_until_another_worker_takes_over(self, kit: Kit) -> None:
        """The owner may continue, because no other worker can run the view now."""
        key, token = kit.placed("lapsed, takeover")

        kit.store.mark_point_of_no_return(key, token)

        assert Unknown("lease-expired") == kit.ask(key)

    def test_marking_after_a_takeover_is_refused(self, kit: Kit) -> None:
        """This is what keeps a worker that stalled just before its effect from having it beside its successor's."""
        key, token = kit.placed("lapsed, takeover")
        kit.granted(key, on_expiry=OnExpiry.TAKEOVER)

        assert kit.accepted(key, token, "mark_point_of_no_return") == []

        assert OnExpiry.TAKEOVER is kit.found(key).on_expiry

    def test_marking_what_is_quarantined_changes_nothing(self, kit: Kit) -> None:
        """It will not be taken over: what marking promises holds already."""
        key, token = kit.begin(on_expiry=OnExpiry.TAKEOVER)
        kit.store.quarantine(key, token, "view-crashed")
        with kit.unchanged(key):
            kit.store.mark_point_of_no_return(key, token)

    def test_a_mismatch_returns_when_the_key_was_first_used(self, kit: Kit) -> None:
        """Over take-overs too."""
        key = kit.key()
        used_at = kit.now
        kit.stand(key, "lapsed, takeover")
        kit.granted(key)

        outcome = kit.ask(key, fingerprint=OTHER_FINGERPRINT)

        assert near(used_at) == getattr(outcome, "first_seen", None)
