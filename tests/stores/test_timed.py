"""A timed store is the store behind it, and says how long that took."""

from __future__ import annotations

from inspect import getattr_static

import pytest

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreUnavailable
from flask_idempotency.engine.offered import CAPABILITIES, capabilities_of
from flask_idempotency.engine.store import Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.timed import TimedStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.contract.quota import Limiting
from flask_idempotency.testing.contract.stress import Modelled
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token


class Stopwatch:
    """Goes on by a second with every look, and notes what it was told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[tuple[str, str, float]] = []

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

    def note(self, call: str, ending: str, seconds: float) -> None:
        self.told.append((call, ending, seconds))


def timed(store: Store) -> tuple[TimedStore, Stopwatch]:
    watch = Stopwatch()
    return TimedStore(store, watch.note, clock=watch), watch


class TestTimed(Modelled, Limiting):
    """It passes every call on, with all that it was given."""

    @pytest.fixture
    def store(self, clock: FrozenClock) -> TimedStore:
        return timed(MemoryStore(clock=clock))[0]


def test_every_call_is_reported_once_with_outcome_and_duration() -> None:
    store, watch = timed(MemoryStore())
    key, token = a_key(), a_token()

    store.claim(a_request(key), token=token, lease=LEASE)
    store.claim(a_request(key), token=a_token(), lease=LEASE)
    store.renew(key, token, lease=LEASE)
    store.mark_point_of_no_return(key, token)
    store.read(key)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    store.claim(a_request(key), token=a_token(), lease=LEASE)
    store.mark_corrupt(key, PAYLOAD)
    other, mine = a_key(), a_token()
    store.claim(a_request(other), token=mine, lease=LEASE)
    store.quarantine(other, mine, "test")
    store.release(other, mine)

    assert [
        ("claim", "granted", 1.0),
        ("claim", "refused", 1.0),
        ("renew", "done", 1.0),
        ("mark_point_of_no_return", "done", 1.0),
        ("read", "done", 1.0),
        ("complete", "done", 1.0),
        ("claim", "replayed", 1.0),
        ("mark_corrupt", "done", 1.0),
        ("claim", "granted", 1.0),
        ("quarantine", "done", 1.0),
        ("release", "done", 1.0),
    ] == watch.told


@pytest.mark.parametrize(
    ("error", "ending"),
    (
        pytest.param(LeaseLost("gone"), "lost", id="lost"),
        pytest.param(StoreUnavailable("away"), "unavailable", id="unavailable"),
        pytest.param(CorruptRecord("damaged"), "failed", id="failed"),
        pytest.param(KeyboardInterrupt(), "failed", id="interrupted"),
    ),
)
def test_a_call_that_raises_is_reported_too(error: BaseException, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time spent on a store that is away is the time that matters most."""
    behind = MemoryStore()

    def fails(key: object) -> None:
        raise error

    monkeypatch.setattr(behind, "read", fails)
    store, watch = timed(behind)

    with pytest.raises(type(error)):
        store.read(a_key())

    assert [("read", ending, 1.0)] == watch.told


def test_the_timed_store_offers_what_its_store_offers() -> None:
    behind = MemoryStore()
    store, watch = timed(behind)

    assert capabilities_of(behind) == capabilities_of(store)
    assert capabilities_of(store).data_keys is not None
    assert [getattr_static(store, name) for name in CAPABILITIES if hasattr(behind, name)]
    assert [getattr(behind, name) for name in CAPABILITIES if hasattr(behind, name)] == [
        getattr(store, name) for name in CAPABILITIES if hasattr(store, name)
    ]
    assert [] == watch.told


def test_the_timed_store_lacks_what_its_store_lacks() -> None:
    store, _ = timed(FaultyStore(MemoryStore()))

    assert capabilities_of(store).data_keys is None
    assert [] == store.calls
