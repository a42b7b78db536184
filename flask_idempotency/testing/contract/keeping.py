"""What time ends, and what it does not."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.model import Replayed, State, Unknown
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)

LONG = 400 * 86400.0


class Keeping:
    """COMPLETED is the only state that time ends, and the clock on the record decides when."""

    def test_an_expired_record_is_absent(self, store: Store, clock: FrozenClock) -> None:
        """Whether or not the store has swept it: for `read`, and for a claim by any request."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(KEEP)

        assert store.read(key) is None
        grant = granted(store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE))
        assert grant.attempt == 1
        assert (found(store, key).state, found(store, key).payload) == (State.PROCESSING, None)

    def test_an_answer_is_kept_to_its_last_moment(self, store: Store, clock: FrozenClock) -> None:
        """As long as was promised, not about as long."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(KEEP - 0.125)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)

    def test_replaying_does_not_lengthen_an_answers_life(self, store: Store, clock: FrozenClock) -> None:
        """It expires when it said it would, however often it was asked for."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(KEEP / 2)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        store.read(key)
        clock.advance(KEEP / 2)

        assert store.read(key) is None

    def test_the_owner_of_an_expired_record_owns_nothing(self, store: Store, clock: FrozenClock) -> None:
        """Expired is absent for writes too: nothing brings an answer back, and releasing it is done already."""
        key = a_key()
        token = stand(store, clock, key, "completed")
        clock.advance(KEEP + 1)

        with pytest.raises(LeaseLost):
            store.complete(key, token, PAYLOAD, keep=KEEP)
        with pytest.raises(LeaseLost):
            store.renew(key, token, lease=LEASE)
        with pytest.raises(LeaseLost):
            store.mark(key, token)
        with pytest.raises(LeaseLost):
            store.hold(key, token, "late")
        store.release(key, token)

        assert store.read(key) is None

    def test_a_claim_in_progress_never_expires(self, store: Store, clock: FrozenClock) -> None:
        """A record that vanished by itself would be a silent release: the payment would run again."""
        key = a_key()
        stand(store, clock, key, "in flight")
        clock.advance(LONG)

        assert State.PROCESSING is found(store, key).state
        assert Unknown("lease-expired") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_quarantined_record_never_expires(self, store: Store, clock: FrozenClock) -> None:
        """It waits for somebody who knows."""
        key = a_key()
        stand(store, clock, key, "quarantined")
        clock.advance(LONG)

        assert Unknown("view-crashed") == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_a_quarantined_record_does_not_inherit_an_expiry(self, store: Store, clock: FrozenClock) -> None:
        """A key that was completed, expired and used again must not carry the first answer's end along."""
        key = a_key()
        stand(store, clock, key, "completed")
        clock.advance(KEEP)
        stand(store, clock, key, "quarantined")
        clock.advance(LONG)

        assert State.QUARANTINED is found(store, key).state
