"""The claims of vanished owners are found, by their own rule and by nobody's guess."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import Reaped
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, State
from flask_idempotency.engine.recovery import Happened
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import ABOUT, KEEP, LEASE, PAYLOAD, a_request, a_token
from tests.maintenance.yard import PAID, Yard, label, still


def test_an_expired_claim_is_quarantined_and_published_once(yard: Yard) -> None:
    key, _ = yard.vanished()

    assert ReapReport(quarantined=1) == yard.reap()
    assert (State.QUARANTINED, "lease-expired") == (yard.read(key).state, yard.read(key).reason)
    assert [Reaped(label(key), ABOUT.operation)] == yard.events
    assert ReapReport() == yard.reap()
    assert len(yard.events) == 1


def test_a_claim_under_takeover_is_left_to_the_next_retry(yard: Yard) -> None:
    """Only that knows the request. It is counted as often as it is met, and told to nobody."""
    key, _ = yard.vanished(on_expiry=OnExpiry.TAKEOVER)
    before = yard.read(key)

    assert ReapReport(waiting=1) == yard.reap() == yard.reap()
    assert (before, []) == (yard.read(key), yard.events)
    assert isinstance(yard.store.claim(a_request(key), token=a_token(), lease=LEASE), Grant)


def test_a_lease_that_ended_after_the_horizon_is_left_alone(yard: Yard, clock: FrozenClock) -> None:
    """The store's clock may have been set forward."""
    key, _ = yard.vanished()

    assert ReapReport() == yard.reap(horizon=clock.now - 1.5)
    assert ReapReport(quarantined=1) == yard.reap(horizon=clock.now - 0.5)
    assert State.QUARANTINED is yard.read(key).state


@pytest.mark.parametrize("batch", (1, 3, 1000))
def test_expired_claims_are_found_in_batches(yard: Yard, clock: FrozenClock, batch: int) -> None:
    for number in range(10):
        yard.claim(on_expiry=OnExpiry.TAKEOVER if number % 2 else OnExpiry.QUARANTINE)
    clock.advance(LEASE)

    assert ReapReport(quarantined=5, waiting=5) == yard.reap(drain=still(batch))


class Meanwhile:
    """What a store finds stale, and something that happens before anybody acts on it."""

    def __init__(self, store: MemoryStore, happens: Callable[[StorageKey], object]) -> None:
        self._unsettled = store.recovery
        self._happens = happens

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        sheet = self._unsettled.expired_leases(horizon=horizon, after=after, limit=limit)
        for found in sheet.found:
            self._happens(found.key)
        return sheet

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        return self._unsettled.quarantine_expired(seen, horizon=horizon)


@pytest.mark.parametrize("event", ("completed", "renewed", "released", "held"))
def test_a_claim_that_its_worker_changes_first_counts_as_overtaken(yard: Yard, clock: FrozenClock, event: str) -> None:
    store = yard.store
    key, token = yard.vanished()
    events: dict[str, Callable[[StorageKey], object]] = {
        "completed": lambda key: store.complete(key, token, PAYLOAD, keep=KEEP),
        "renewed": lambda key: store.renew(key, token, lease=LEASE),
        "released": lambda key: store.release(key, token),
        "held": lambda key: store.quarantine(key, token, "view-crashed"),
    }
    late = Yard(store, clock)
    late.store = type("", (), {"recovery": Meanwhile(store, events[event])})()

    assert ReapReport(overtaken=1) == late.reap()
    assert late.events == []
    record = store.read(key)
    assert record is None or record.reason != "lease-expired"


class Failing:
    """A store that does not answer now and then, before or after it has done what it was asked."""

    def __init__(self, store: MemoryStore, *, verb: str, nth: int, reply: bool = False) -> None:
        self._unsettled, self._verb, self._nth, self._reply = store.recovery, verb, nth, reply
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            self.calls += name == self._verb
            fails = name == self._verb and self.calls == self._nth
            if fails and not self._reply:
                raise StoreUnavailable("down")
            answer = getattr(self._unsettled, name)(*arguments, **options)
            if fails:
                raise StoreUnavailable("the reply was lost")
            return answer

        return call


@pytest.mark.parametrize("reply", (False, True), ids=("request", "reply"))
@pytest.mark.parametrize("verb", ("expired_leases", "quarantine_expired"))
@pytest.mark.parametrize("nth", (1, 2))
def test_a_step_is_retried_after_a_store_failure(
    yard: Yard, clock: FrozenClock, verb: str, nth: int, reply: bool
) -> None:
    keys = [yard.claim()[0] for _ in range(40)]
    waiting = [yard.claim(on_expiry=OnExpiry.TAKEOVER)[0] for _ in range(10)]
    clock.advance(LEASE)
    store = yard.store
    yard.store = type("", (), {"recovery": Failing(store, verb=verb, nth=nth, reply=reply)})()
    report = yard.reap(drain=still(20))
    yard.store = store
    untold = verb == "quarantine_expired" and reply

    assert {State.QUARANTINED} == {yard.read(key).state for key in keys}
    assert (40 - untold, len(waiting), 1) == (report.quarantined, report.waiting, report.shrunk)
    labels = [event.record for event in yard.events]
    assert (40 - untold, len(labels)) == (len(labels), len(set(labels)))


def test_quarantined_claims_stay_quarantined_after_a_store_failure(yard: Yard, clock: FrozenClock) -> None:
    for _ in range(8):
        yard.claim()
    clock.advance(LEASE)
    store = yard.store
    yard.store = type("", (), {"recovery": Failing(store, verb="quarantine_expired", nth=4)})()
    with pytest.raises(StoreUnavailable):
        yard.reap(drain=still(8))
    yard.store = store

    assert len(yard.events) == 3
    assert ReapReport(quarantined=5) == yard.reap()
    assert len({event.record for event in yard.events}) == len(yard.events) == 8


def test_without_resolvers_no_key_is_due(yard: Yard) -> None:
    """Nor is anybody's turn used up: it may be another deployment that has them."""
    key, _ = yard.vanished()
    yard.reap()

    assert [key] == [
        found.key
        for found in yard.store.recovery.next_for_resolver(horizon=yard.clock.now, least=30, most=3600, limit=10)
    ]


def test_a_reap_that_its_budget_ends_leaves_the_rest_to_the_next(yard: Yard, clock: FrozenClock) -> None:
    for _ in range(9):
        yard.claim()
    clock.advance(LEASE)
    spent = still(3)
    report = yard.reap(drain=type(spent)(3, budget=0.0, sleep=spent.sleep, monotonic=spent.monotonic))

    assert (ReapReport(quarantined=3, finished=False), ReapReport(quarantined=6)) == (report, yard.reap())


def test_resolvers_are_asked_in_a_run_whose_budget_expired_claims_take(yard: Yard, clock: FrozenClock) -> None:
    """Otherwise more expired claims than one run handles would keep every quarantined key from its resolver."""
    yard.held()
    yard.says = (lambda unknown: Happened(PAID),)
    for _ in range(9):
        yard.claim()
    clock.advance(LEASE)
    spent = still(3)
    report = yard.reap(drain=type(spent)(3, budget=0.0, sleep=spent.sleep, monotonic=spent.monotonic))

    assert (False, 1) == (report.finished, report.completed)
