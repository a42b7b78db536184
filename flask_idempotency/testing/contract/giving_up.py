"""A claim whose reply never came is released, and may arrive after that."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import InFlight, Replayed
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.examples import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted


class GivingUp:
    """Whoever asked with a token that was released has gone: a key granted to it would be nobody's until its lease ends."""

    def test_a_claim_that_comes_after_its_release_is_not_granted(self, store: Store) -> None:
        """The key stays free, for the next who asks."""
        key, token = a_key(), a_token()
        store.release(key, token)

        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=token, lease=LEASE)

        assert store.read(key) is None
        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).attempt == 1

    @pytest.mark.parametrize("times", (1, 2))
    def test_a_claim_that_comes_once_more_after_its_release_is_not_granted(self, store: Store, times: int) -> None:
        """Also where the release was sent twice: a client that hears nothing repeats whatever it asks."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        for _ in range(times):
            store.release(key, token)

        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=token, lease=LEASE)

        assert store.read(key) is None
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    def test_a_claim_that_was_given_up_learns_what_others_do(self, store: Store) -> None:
        """It is refused as any other is: what is known of a key is told to whoever asks."""
        key, token, others = a_key(), a_token(), a_token()
        store.release(key, token)
        granted(store.claim(a_request(key), token=others, lease=LEASE))

        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), InFlight)
        store.complete(key, others, PAYLOAD, keep=KEEP)
        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Replayed)
