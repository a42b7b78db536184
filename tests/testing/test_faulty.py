"""The faulty store fails where it was told to, and nowhere else."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.contract import StoreContract
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted


class TestFaultyStoreWithoutFaults(StoreContract):
    """Told nothing, it is the store that it wraps."""

    @pytest.fixture
    def store(self, clock: FrozenClock) -> FaultyStore:
        return FaultyStore(MemoryStore(clock))


def test_a_lost_request_was_not_applied() -> None:
    """The store never heard of it."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.lose_request("claim")

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert store.read(key) is None


def test_a_lost_reply_was_applied() -> None:
    """The store has acted, and the caller cannot know."""
    store, key, token = FaultyStore(MemoryStore()), a_key(), a_token()
    store.lose_reply("complete")
    granted(store.claim(a_request(key), token=token, lease=LEASE))

    with pytest.raises(StoreUnavailable):
        store.complete(key, token, PAYLOAD, keep=KEEP)

    record = store.read(key)
    assert record is not None
    assert record.payload == PAYLOAD


def test_faults_are_counted_from_where_they_were_asked_for() -> None:
    """The second call of any kind from now, once."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.read(key)
    store.lose_request(nth=2)

    store.read(key)
    with pytest.raises(StoreUnavailable):
        store.read(key)
    store.read(key)

    assert store.verbs() == ["read"] * 4


def test_a_store_that_is_down_loses_everything() -> None:
    """Until it is up again."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.down = True
    with pytest.raises(StoreUnavailable):
        store.read(key)
    store.down = False

    assert store.read(key) is None


def test_calls_are_noted_with_their_tokens() -> None:
    """So that a test can tell who asked for what."""
    store, key, token = FaultyStore(MemoryStore()), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)

    assert [(call.verb, call.key, call.token) for call in store.calls] == [
        ("claim", key, token),
        ("release", key, token),
    ]
