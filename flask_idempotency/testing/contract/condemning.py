"""A record that nobody can open is quarantined, and is never an absent one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.model import CORRUPT, Mismatched, Payload, Replayed, SealedBy, State, Unknown
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    stand,
)

LONG = 400 * 86400.0


class Condemning:
    """Whoever finds an answer damaged says which bytes were found: nothing else is condemned for them."""

    def test_a_condemned_record_is_quarantined_with_all_that_it_holds(self, store: Store, clock: FrozenClock) -> None:
        """Somebody may yet be able to read it, once the right key is there again."""
        key = a_key()
        token = stand(store, clock, key, "completed")
        before = found(store, key)
        store.condemn(key, PAYLOAD)
        after = found(store, key)

        assert (after.state, after.reason) == (State.QUARANTINED, CORRUPT)
        assert (PAYLOAD, token, before.fence) == (after.payload, after.token, after.fence)
        assert (before.attempt, before.about, before.requested_at) == (after.attempt, after.about, after.requested_at)
        assert (before.fingerprint, before.on_lapse) == (after.fingerprint, after.on_lapse)

    def test_a_condemned_record_never_runs_again(self, store: Store, clock: FrozenClock) -> None:
        """Not even when the life of the answer would long have ended."""
        key = a_key()
        stand(store, clock, key, "completed")
        store.condemn(key, PAYLOAD)
        clock.advance(LONG)

        assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)
        another = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)
        assert isinstance(another, Mismatched)

    def test_a_condemned_record_is_as_good_as_completed_to_its_owner(self, store: Store, clock: FrozenClock) -> None:
        """The work was done, or there would be no answer: to let the key run again would do it twice."""
        key = a_key()
        token = stand(store, clock, key, "completed")
        store.condemn(key, PAYLOAD)
        before = found(store, key)
        with pytest.raises(LeaseLost):
            store.release(key, token)
        with pytest.raises(LeaseLost):
            store.hold(key, token, "who knows")
        with pytest.raises(LeaseLost):
            store.mark(key, token)

        assert before == found(store, key)
        store.renew(key, token, lease=LEASE)
        store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)
        assert (found(store, key).state, found(store, key).payload) == (State.COMPLETED, OTHER_PAYLOAD)

    def test_to_condemn_twice_is_to_condemn_once(self, store: Store, clock: FrozenClock) -> None:
        """Every retry finds the same damage."""
        key = a_key()
        stand(store, clock, key, "completed")
        store.condemn(key, PAYLOAD)
        once = found(store, key)
        store.condemn(key, PAYLOAD)

        assert once == found(store, key)

    @pytest.mark.parametrize(
        "other",
        (
            OTHER_PAYLOAD,
            replace(PAYLOAD, data=PAYLOAD.data + b" "),
            replace(PAYLOAD, data=b""),
            replace(PAYLOAD, sealed_by=SealedBy("2026", 1)),
        ),
        ids=("another answer", "longer", "empty", "under a key"),
    )
    def test_another_payload_than_was_found_is_not_condemned(
        self, store: Store, clock: FrozenClock, other: Payload
    ) -> None:
        """It may have been sealed anew since it was read, or the damage was in a cache."""
        key = a_key()
        stand(store, clock, key, "completed")
        store.condemn(key, other)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)

    @pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_completed_is_not_condemned(self, store: Store, clock: FrozenClock, standing: Standing) -> None:
        """There is no answer in it that could be damaged."""
        key = a_key()
        stand(store, clock, key, standing)
        before = found(store, key)
        store.condemn(key, PAYLOAD)

        assert before == found(store, key)

    def test_what_is_absent_is_not_condemned(self, store: Store, clock: FrozenClock) -> None:
        """A key that was never used, or whose answer's life is over, is free."""
        key, expired = a_key(), a_key()
        stand(store, clock, expired, "completed")
        clock.advance(KEEP)
        store.condemn(key, PAYLOAD)
        store.condemn(expired, PAYLOAD)

        assert (store.read(key), store.read(expired)) == (None, None)

    def test_the_facts_of_a_sealed_answer_are_told_as_they_were_given(self, store: Store, clock: FrozenClock) -> None:
        """Number 0 needs no data key; that it is told again decides which key opens it, or that none does."""
        key, token = a_key(), a_token()
        payload = Payload(b"", 402, False, 0, SealedBy("", 0))
        store.claim(a_request(key), token=token, lease=LEASE)
        store.complete(key, token, payload, keep=KEEP)

        assert payload == found(store, key).payload
