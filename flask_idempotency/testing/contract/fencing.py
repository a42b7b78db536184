"""That fences rise for ever."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.model import OnLapse
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    granted,
)


class Fencing:
    """A later claim of a key has a higher fence, so that `WHERE fence <= :mine` keeps an earlier one out."""

    @pytest.mark.parametrize("ended", ("released", "released, clock set back", "expired", "taken over"))
    def test_the_next_fence_is_higher(self, store: Store, clock: FrozenClock, ended: str) -> None:
        """However the last claim ended, and whatever was done to the clock."""
        key = a_key()
        fences = []
        for _ in range(4):
            token = a_token()
            ask = a_request(key, on_lapse=OnLapse.TAKEOVER)
            fences.append(granted(store.claim(ask, token=token, lease=LEASE)).fence)
            match ended:
                case "released":
                    store.release(key, token)
                case "released, clock set back":
                    store.release(key, token)
                    clock.advance(-7200)
                case "expired":
                    store.complete(key, token, PAYLOAD, keep=KEEP)
                    clock.advance(KEEP)
                case "taken over":
                    clock.advance(LEASE)

        assert sorted(set(fences)) == fences

    def test_a_clock_set_back_does_not_free_a_key(self, store: Store, clock: FrozenClock) -> None:
        """The lease lasts longer then: late, not unsafe. The take-over still gets the higher fence."""
        key = a_key()
        ask = a_request(key, on_lapse=OnLapse.TAKEOVER)
        first = granted(store.claim(ask, token=a_token(), lease=LEASE))
        clock.advance(-86400)
        refused = store.claim(ask, token=a_token(), lease=LEASE)
        clock.advance(86400 + LEASE)

        assert getattr(refused, "retry_after", 0) > LEASE
        assert granted(store.claim(ask, token=a_token(), lease=LEASE)).fence > first.fence

    def test_a_fence_is_a_positive_number_that_databases_can_hold(self, store: Store) -> None:
        """A signed 64-bit column, and a double without loss."""
        fence = granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence

        assert 0 < fence < 2**53
