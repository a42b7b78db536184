"""Contract of ending a claim: complete, release, quarantine and mark_corrupt, each exactly once."""

from __future__ import annotations

from dataclasses import replace

from flask_idempotency.engine.model import (
    CORRUPT,
    Mismatched,
    OnExpiry,
    Record,
    SealedBy,
    State,
    StoredPayload,
    Unknown,
)
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    LONG,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Contract,
    Kit,
    Quarantined,
    Standing,
    a_token,
    for_each,
    near,
)


class MarkingCorrupt(Contract):
    """A caller that finds a damaged response passes the bytes that it found. The store marks no others."""

    def test_a_condemned_record_is_quarantined_with_all_that_it_holds(self, kit: Kit) -> None:
        """A later attempt may read it, when the right key is back."""
        key, token = kit.placed("completed")
        before = kit.found(key)
        kit.store.mark_corrupt(key, PAYLOAD)
        after = kit.found(key)

        assert (after.state, after.reason) == (State.QUARANTINED, CORRUPT)
        assert (PAYLOAD, token, before.fence) == (after.payload, after.token, after.fence)
        assert (before.attempt, before.info, before.requested_at) == (after.attempt, after.info, after.requested_at)
        assert (before.fingerprint, before.on_expiry) == (after.fingerprint, after.on_expiry)

    def test_a_condemned_record_never_runs_again(self, kit: Kit) -> None:
        """Not even after the response would have expired."""
        key, _ = kit.placed("condemned")
        kit.advance(LONG)

        assert Unknown(CORRUPT) == kit.ask(key)
        another = kit.ask(key, fingerprint=OTHER_FINGERPRINT)
        assert isinstance(another, Mismatched)

    def test_a_corrupt_record_is_a_completed_one_to_its_owner(self, kit: Kit) -> None:
        """The request completed, or there would be no response. Releasing the key would run it twice."""
        key, token = kit.placed("condemned")
        with kit.unchanged(key):
            assert kit.accepted(key, token, "release", "quarantine", "mark_point_of_no_return") == []
        kit.store.renew(key, token, lease=LEASE)
        kit.store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)
        assert (kit.found(key).state, kit.found(key).payload) == (State.COMPLETED, OTHER_PAYLOAD)

    def test_to_condemn_twice_is_to_condemn_once(self, kit: Kit) -> None:
        """Every retry finds the same damage."""
        key, _ = kit.placed("condemned")
        with kit.unchanged(key):
            kit.store.mark_corrupt(key, PAYLOAD)

    @for_each(
        "other",
        (
            OTHER_PAYLOAD,
            replace(PAYLOAD, data=PAYLOAD.data + b" "),
            replace(PAYLOAD, data=b""),
            replace(PAYLOAD, sealed_by=SealedBy("2026", 1)),
        ),
        ids=("another response", "longer", "empty", "under a key"),
    )
    def test_another_payload_than_was_found_is_not_condemned(self, kit: Kit, other: StoredPayload) -> None:
        """It may have been sealed again since it was read, or the cache was damaged."""
        key, _ = kit.placed("completed")
        kit.store.mark_corrupt(key, other)

        assert isinstance(kit.ask(key), Record)

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_completed_is_not_condemned(self, kit: Kit, standing: Standing) -> None:
        """It has no response that could be damaged."""
        key, _ = kit.placed(standing)
        with kit.unchanged(key):
            kit.store.mark_corrupt(key, PAYLOAD)

    def test_what_is_absent_is_not_condemned(self, kit: Kit) -> None:
        """A key that was never used, or whose response has expired, is free."""
        key, expired = kit.key(), kit.complete()
        kit.advance(KEEP)
        kit.store.mark_corrupt(key, PAYLOAD)
        kit.store.mark_corrupt(expired, PAYLOAD)

        assert (kit.store.read(key), kit.store.read(expired)) == (None, None)

    def test_the_facts_of_a_sealed_response_are_returned_unchanged(self, kit: Kit) -> None:
        """Number 0 needs no data key. `read` must return it, because it decides which key opens the response."""
        payload = StoredPayload(b"", 402, False, 0, SealedBy("", 0))

        assert payload == kit.found(kit.complete(payload=payload)).payload


PAYLOADS = {
    "empty": StoredPayload(data=b"", status=204, success=True, byte_size=0),
    "zero": StoredPayload(data=b"0", status=200, success=True, byte_size=1),
    "every byte": StoredPayload(data=bytes(range(256)) * 2, status=422, success=False, byte_size=512),
    "ends in nothing": StoredPayload(data=b"\r\n\0", status=302, success=True, byte_size=3),
    "a mebibyte": StoredPayload(data=bytes(range(256)) * 4096, status=200, success=True, byte_size=5_000_000_000),
}


class Settling(Contract):
    """The first response that the store accepts stays."""

    @for_each("payload", list(PAYLOADS.values()), ids=list(PAYLOADS))
    def test_a_result_is_replayed_unchanged(self, kit: Kit, payload: StoredPayload) -> None:
        """Every byte of it, also when there are none: presence is a state, never truthiness."""
        key = kit.complete(payload=payload)

        assert kit.found(key) == kit.ask(key)
        assert payload == kit.found(key).payload

    def test_a_completed_record_tells_its_story(self, kit: Kit) -> None:
        """When it was requested, when it completed, when it expires, and which worker completed it."""
        key, asked_at = kit.key(), kit.now
        grant = kit.granted(key)
        kit.advance(7.25)
        kit.store.complete(key, grant.token, PAYLOAD, keep=KEEP)
        kit.advance(100)

        record = kit.found(key)

        assert (State.COMPLETED, grant.token, grant.fence, 1) == (
            record.state,
            record.token,
            record.fence,
            record.attempt,
        )
        assert (record.fingerprint, record.info, record.reason) == (FINGERPRINT, ABOUT, "")
        assert (near(asked_at), near(asked_at + 7.25)) == (record.requested_at, record.completed_at)
        assert (near(asked_at + 7.25 + KEEP), near(KEEP - 100)) == (record.deadline, record.remaining)

    def test_the_first_result_stays(self, kit: Kit) -> None:
        """Completing again is no error, because a reply may have been lost. It changes neither response nor expiry."""
        key, token = kit.placed("completed")
        with kit.unchanged(key):
            kit.store.complete(key, token, OTHER_PAYLOAD, keep=10 * KEEP)

    @for_each("standing", ("lapsed, takeover", "lapsed, quarantine"))
    def test_a_late_result_is_accepted(self, kit: Kit, standing: Standing) -> None:
        """The lease says when other workers may act. If none has, the owner may still complete."""
        key, token = kit.placed(standing)

        assert kit.completes(key, token)

        assert kit.found(key).payload == PAYLOAD

    def test_a_response_ends_the_quarantine_of_an_expired_claim(self, kit: Kit) -> None:
        """The owner was slow, not dead: it knows the result, and all retries now get it."""
        key, token = kit.placed("noticed")

        kit.store.complete(key, token, PAYLOAD, keep=KEEP)

        record = kit.found(key)
        assert (record.state, record.payload, record.reason) == (State.COMPLETED, PAYLOAD, "")

    def test_a_long_quarantine_can_still_be_completed(self, kit: Kit) -> None:
        """The token stays good for `complete` after `hold`. After a year the dates are right."""
        key, token = kit.placed("quarantined")
        kit.advance(LONG)

        kit.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert kit.found(key) == kit.ask(key)
        assert near(kit.now) == kit.found(key).completed_at

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover"))
    def test_a_released_key_may_run_again(self, kit: Kit, standing: Standing) -> None:
        """As if it had never been used: by another request too, and as attempt 1. Only its owner knows what its view did."""
        key, token = kit.placed(standing)
        kit.store.release(key, token)
        assert kit.store.read(key) is None

        assert kit.granted(key, fingerprint=OTHER_FINGERPRINT).attempt == 1

    def test_releasing_what_is_absent_is_done_already(self, kit: Kit) -> None:
        """A release whose reply was lost is repeated; a key that was never used is released just the same."""
        key, token = kit.placed("in flight")
        kit.store.release(key, token)

        kit.store.release(key, token)
        kit.store.release(kit.key(), a_token())

        assert kit.store.read(key) is None

    def test_a_completed_record_is_settled_for_good(self, kit: Kit) -> None:
        """Its own token can neither release nor quarantine a completed record. Only time ends it."""
        key, token = kit.placed("completed")
        with kit.unchanged(key):
            assert kit.accepted(key, token) == ["renew", "complete"]

    def test_held_is_quarantined(self, kit: Kit) -> None:
        """The record has this reason, and keeps its token and its lease."""
        key, token = kit.placed("in flight")
        before = kit.found(key)

        kit.store.quarantine(key, token, "outcome-lost: größer")

        record = kit.found(key)
        assert (record.state, record.reason) == (State.QUARANTINED, "outcome-lost: größer")
        assert (token, before.fence, before.deadline) == (record.token, record.fence, record.deadline)

    def test_a_held_claim_is_never_taken_over(self, kit: Kit) -> None:
        """Not even if its lease has expired under take-over: the owner has declared the outcome unknown."""
        key, token = kit.begin(on_expiry=OnExpiry.TAKEOVER)
        kit.store.quarantine(key, token, "view-crashed")
        kit.advance(LEASE + 1)

        assert Unknown("view-crashed") == kit.ask(key, on_expiry=OnExpiry.TAKEOVER)

    @for_each("how", ("quarantined", "noticed"))
    def test_the_first_reason_stays(self, kit: Kit, how: Quarantined) -> None:
        """A second quarantine is no error and changes no record."""
        key, token = kit.placed(how)
        with kit.unchanged(key):
            kit.store.quarantine(key, token, "another-reason")
