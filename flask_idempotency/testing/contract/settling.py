"""Contract of ending a claim: complete, release, quarantine and mark_corrupt, each exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

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
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    LONG,
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


class MarkingCorrupt:
    """A caller that finds a damaged response passes the bytes that it found. The store marks no others."""

    def test_a_condemned_record_is_quarantined_with_all_that_it_holds(self, store: Store, clock: FrozenClock) -> None:
        """A later attempt may read it, when the right key is back."""
        key, token = placed(store, clock, "completed")
        before = found(store, key)
        store.mark_corrupt(key, PAYLOAD)
        after = found(store, key)

        assert (after.state, after.reason) == (State.QUARANTINED, CORRUPT)
        assert (PAYLOAD, token, before.fence) == (after.payload, after.token, after.fence)
        assert (before.attempt, before.info, before.requested_at) == (after.attempt, after.info, after.requested_at)
        assert (before.fingerprint, before.on_expiry) == (after.fingerprint, after.on_expiry)

    def test_a_condemned_record_never_runs_again(self, store: Store, clock: FrozenClock) -> None:
        """Not even after the response would have expired."""
        key, _ = placed(store, clock, "completed")
        store.mark_corrupt(key, PAYLOAD)
        clock.advance(LONG)

        assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)
        another = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)
        assert isinstance(another, Mismatched)

    def test_a_corrupt_record_is_a_completed_one_to_its_owner(self, store: Store, clock: FrozenClock) -> None:
        """The request completed, or there would be no response. Releasing the key would run it twice."""
        key, token = placed(store, clock, "completed")
        store.mark_corrupt(key, PAYLOAD)
        before = found(store, key)
        assert lost(lambda: store.release(key, token))
        assert lost(lambda: store.quarantine(key, token, "who knows"))
        assert lost(lambda: store.mark_point_of_no_return(key, token))

        assert before == found(store, key)
        store.renew(key, token, lease=LEASE)
        store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)
        assert (found(store, key).state, found(store, key).payload) == (State.COMPLETED, OTHER_PAYLOAD)

    def test_to_condemn_twice_is_to_condemn_once(self, store: Store, clock: FrozenClock) -> None:
        """Every retry finds the same damage."""
        key, _ = placed(store, clock, "completed")
        store.mark_corrupt(key, PAYLOAD)
        once = found(store, key)
        store.mark_corrupt(key, PAYLOAD)

        assert once == found(store, key)

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
    def test_another_payload_than_was_found_is_not_condemned(
        self, store: Store, clock: FrozenClock, other: StoredPayload
    ) -> None:
        """It may have been sealed again since it was read, or the cache was damaged."""
        key, _ = placed(store, clock, "completed")
        store.mark_corrupt(key, other)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_completed_is_not_condemned(self, store: Store, clock: FrozenClock, standing: Standing) -> None:
        """It has no response that could be damaged."""
        key, _ = placed(store, clock, standing)
        before = found(store, key)
        store.mark_corrupt(key, PAYLOAD)

        assert before == found(store, key)

    def test_what_is_absent_is_not_condemned(self, store: Store, clock: FrozenClock) -> None:
        """A key that was never used, or whose response has expired, is free."""
        key, expired = a_key(), a_key()
        stand(store, clock, expired, "completed")
        clock.advance(KEEP)
        store.mark_corrupt(key, PAYLOAD)
        store.mark_corrupt(expired, PAYLOAD)

        assert (store.read(key), store.read(expired)) == (None, None)

    def test_the_facts_of_a_sealed_response_are_returned_unchanged(self, store: Store, clock: FrozenClock) -> None:
        """Number 0 needs no data key. `read` must return it, because it decides which key opens the response."""
        key, token = a_key(), a_token()
        payload = StoredPayload(b"", 402, False, 0, SealedBy("", 0))
        store.claim(a_request(key), token=token, lease=LEASE)
        store.complete(key, token, payload, keep=KEEP)

        assert payload == found(store, key).payload


PAYLOADS = {
    "empty": StoredPayload(data=b"", status=204, success=True, byte_size=0),
    "zero": StoredPayload(data=b"0", status=200, success=True, byte_size=1),
    "every byte": StoredPayload(data=bytes(range(256)) * 2, status=422, success=False, byte_size=512),
    "ends in nothing": StoredPayload(data=b"\r\n\0", status=302, success=True, byte_size=3),
    "a mebibyte": StoredPayload(data=bytes(range(256)) * 4096, status=200, success=True, byte_size=5_000_000_000),
}


class Settling:
    """The first response that the store accepts stays."""

    @for_each("payload", list(PAYLOADS.values()), ids=list(PAYLOADS))
    def test_a_result_is_replayed_unchanged(self, store: Store, payload: StoredPayload) -> None:
        """Every byte of it, also when there are none: presence is a state, never truthiness."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, payload, keep=KEEP)

        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)

        assert isinstance(outcome, Record)
        assert payload == outcome.payload

    def test_a_completed_record_tells_its_story(self, store: Store, clock: FrozenClock) -> None:
        """When it was requested, when it completed, when it expires, and which worker completed it."""
        key, token = a_key(), a_token()
        asked_at = clock.now
        grant = granted(store.claim(a_request(key), token=token, lease=LEASE))
        clock.advance(7.25)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        clock.advance(100)

        record = found(store, key)

        assert (State.COMPLETED, token, grant.fence, 1) == (record.state, record.token, record.fence, record.attempt)
        assert (record.fingerprint, record.info, record.reason) == (FINGERPRINT, ABOUT, "")
        assert (near(asked_at), near(asked_at + 7.25)) == (record.requested_at, record.completed_at)
        assert (near(asked_at + 7.25 + KEEP), near(KEEP - 100)) == (record.deadline, record.remaining)

    def test_the_first_result_stays(self, store: Store, clock: FrozenClock) -> None:
        """Completing again is no error, because a reply may have been lost. It changes neither response nor expiry."""
        key, token = placed(store, clock, "completed")
        before = found(store, key)

        store.complete(key, token, OTHER_PAYLOAD, keep=10 * KEEP)

        assert before == found(store, key)

    def test_a_late_result_is_accepted(self, store: Store, clock: FrozenClock) -> None:
        """The lease says when other workers may act. If none has, the owner may still complete."""
        key, token = placed(store, clock, "lapsed, quarantine")

        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert found(store, key).payload == PAYLOAD

    def test_a_response_ends_the_quarantine_of_an_expired_claim(self, store: Store, clock: FrozenClock) -> None:
        """The owner was slow, not dead: it knows the result, and all retries now get it."""
        key, token = placed(store, clock, "lapsed, quarantine")
        assert Unknown("lease-expired") == store.claim(a_request(key), token=a_token(), lease=LEASE)

        store.complete(key, token, PAYLOAD, keep=KEEP)

        record = found(store, key)
        assert (record.state, record.payload, record.reason) == (State.COMPLETED, PAYLOAD, "")

    def test_a_result_ends_the_quarantine_of_a_held_record(self, store: Store, clock: FrozenClock) -> None:
        """The token stays good for `complete` after `hold`."""
        key, token = placed(store, clock, "quarantined")

        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert found(store, key) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_long_quarantine_can_still_be_completed(self, store: Store, clock: FrozenClock) -> None:
        """After a year an owner can still complete, and the dates are right."""
        key, token = placed(store, clock, "quarantined")
        clock.advance(400 * 86400)

        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert near(clock.now) == found(store, key).completed_at

    def test_a_released_key_may_run_again(self, store: Store, clock: FrozenClock) -> None:
        """As if it had never been used: by another request too, and as attempt 1."""
        key, token = placed(store, clock, "in flight")
        store.release(key, token)
        assert store.read(key) is None

        again = a_request(key, fingerprint=b"\x01" + b"n" * 16)

        assert granted(store.claim(again, token=a_token(), lease=LEASE)).attempt == 1

    def test_releasing_what_is_absent_is_done_already(self, store: Store, clock: FrozenClock) -> None:
        """A release whose reply was lost is repeated; a key that was never used is released just the same."""
        key, token = placed(store, clock, "in flight")
        store.release(key, token)

        store.release(key, token)
        store.release(a_key(), a_token())

        assert store.read(key) is None

    def test_the_owner_may_release_its_quarantined_record(self, store: Store, clock: FrozenClock) -> None:
        """Only the owner knows that its view had no effect."""
        key, token = placed(store, clock, "quarantined")

        store.release(key, token)

        assert store.read(key) is None

    def test_an_expired_claim_can_be_released(self, store: Store, clock: FrozenClock) -> None:
        """Late, and still owned by the same worker."""
        key, token = placed(store, clock, "lapsed, takeover")
        store.release(key, token)

        assert store.read(key) is None

    @for_each("verb", ("release", "quarantine", "mark_point_of_no_return"))
    def test_a_completed_record_is_settled_for_good(self, store: Store, clock: FrozenClock, verb: str) -> None:
        """Its own token can neither release nor quarantine a completed record. Only time ends it."""
        key, token = placed(store, clock, "completed")
        before = found(store, key)
        writes: dict[str, Callable[[], object]] = {
            "release": lambda: store.release(key, token),
            "quarantine": lambda: store.quarantine(key, token, "second thoughts"),
            "mark_point_of_no_return": lambda: store.mark_point_of_no_return(key, token),
        }

        assert lost(lambda: writes[verb]())

        assert before == found(store, key)

    def test_held_is_quarantined(self, store: Store, clock: FrozenClock) -> None:
        """The record has this reason, and keeps its token and its lease."""
        key, token = placed(store, clock, "in flight")
        before = found(store, key)

        store.quarantine(key, token, "outcome-lost: größer")

        record = found(store, key)
        assert (record.state, record.reason) == (State.QUARANTINED, "outcome-lost: größer")
        assert (token, before.fence, before.deadline) == (record.token, record.fence, record.deadline)

    def test_a_held_claim_is_never_taken_over(self, store: Store, clock: FrozenClock) -> None:
        """Not even if its lease has expired under take-over: the owner has declared the outcome unknown."""
        key = a_key()
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)
        token = granted(store.claim(ask, token=a_token(), lease=LEASE)).token
        store.quarantine(key, token, "view-crashed")
        clock.advance(LEASE + 1)

        assert Unknown("view-crashed") == store.claim(ask, token=a_token(), lease=LEASE)

    @for_each("standing", ("held", "lapsed"))
    def test_the_first_reason_stays(self, store: Store, clock: FrozenClock, standing: str) -> None:
        """A second quarantine is no error and changes no record."""
        key, token = placed(store, clock, "quarantined" if standing == "held" else "lapsed, quarantine")
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        before = found(store, key)
        assert before.state is State.QUARANTINED

        store.quarantine(key, token, "another-reason")

        assert before == found(store, key)

    @for_each("keep", (0.0, -1.0, math.inf, math.nan))
    def test_an_answer_without_an_end_is_refused(self, store: Store, clock: FrozenClock, keep: float) -> None:
        """With 0 it would be lost, and with infinity it could not be stored. The claim stays."""
        key, token = placed(store, clock, "in flight")
        before = found(store, key)

        with pytest.raises(ValueError, match="duration"):
            store.complete(key, token, PAYLOAD, keep=keep)

        assert before == found(store, key)
