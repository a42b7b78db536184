"""The status of a key says what a claim of it would find, and leaves the key as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import CorruptRecord, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import InFlight, Record, State, StoredResponse, Unknown
from flask_idempotency.engine.status import KeyStatus, status_of
from flask_idempotency.engine.waiting import SLOTS_PER_KEY, Waiters
from tests.engine.conftest import House, new_house

DONE = StoredResponse(status=201, body=b"paid")
SECONDS = 60
"""A test fails if an event takes longer."""


class Detector:
    """Loses data when told to, and remembers what it was asked."""

    def __init__(self, *, lost: bool = False, runs: bool = True) -> None:
        self.lost, self.runs = lost, runs
        self.asked: list[tuple[float | None, bool]] = []

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, record: Record | None = None) -> bool:
        self.asked.append((key_timestamp, record is not None))
        if self.lost:
            raise StoreDataLoss("lost", loss="changed")
        return self.runs


def status(house: House, *, identities: tuple[int, ...] = (0,), **how: Any) -> KeyStatus:
    return status_of(house.engine, [house.request(identity=each) for each in identities], **how)


def detecting(house: House, detector: Detector) -> Engine:
    return Engine(replace(house.around, data_loss=detector))  # type: ignore[arg-type]


def begin(house: House, state: str) -> Claim | None:
    if state == "absent":
        return None
    claim = house.won(effects="marked" if state == "paused" else "plain")
    match state:
        case "done":
            claim.complete(DONE)
        case "quarantined":
            claim.quarantine("unclear")
        case "released":
            claim.release("status-503")
        case "expired":
            claim.complete(DONE)
            house.clock.advance(house.policy.keep + 1)
        case "paused" | "lapsed":
            house.clock.advance(house.policy.lease + 1)
    return claim


STATES = {
    "absent": "absent",
    "released": "absent",
    "expired": "absent",
    "running": "in-flight",
    "paused": "paused",
    "lapsed": "outcome-unknown",
    "quarantined": "outcome-unknown",
    "done": "done",
}


@pytest.mark.parametrize(("state", "expected"), STATES.items())
def test_each_state_and_no_write(house: House, state: str, expected: str) -> None:
    begin(house, state)
    house.store.calls.clear()
    told = len(house.events)

    found = status(house)

    assert (expected, expected != "absent") == (found.state, found.record is not None)
    assert ["read"] == house.store.calls
    assert told == len(house.events)


@pytest.mark.parametrize("state", STATES)
def test_a_claim_finds_what_the_status_said(house: House, state: str) -> None:
    begin(house, state)
    found = status(house)
    outcome = house.claim()

    kinds = {"in-flight": InFlight, "outcome-unknown": Unknown, "absent": Claim, "paused": Claim}
    assert isinstance(outcome, kinds.get(found.state, object))
    if isinstance(outcome, Claim):
        assert {"absent": 1, "paused": 2}[found.state] == outcome.attempt


KINDS = ("absent", "running", "paused", "quarantined", "done")


def test_every_secret_in_use_is_looked_under() -> None:
    for older, newer in product(KINDS, KINDS):
        house = new_house()
        marked = replace(house.policy, effects="marked")
        states = {1: older, 0: newer}
        for identity in (each for each, state in states.items() if state == "paused"):
            house.won(house.request(identity=identity, policy=marked), effects="marked")
        house.clock.advance(house.policy.lease + 1)
        for identity, state in states.items():
            if state in ("running", "quarantined", "done"):
                claim = house.won(house.request(identity=identity))
                if state == "done":
                    claim.complete(DONE)
                elif state == "quarantined":
                    claim.quarantine("unclear")
        both = [STATES[state] for state in (older, newer)]
        refusing = [state for state in both if state not in ("absent", "paused")]

        found = status(house, identities=(0, 1))

        assert (refusing or (["paused"] if "paused" in both else ["absent"]))[0] == found.state, (older, newer)
        assert found.state == "absent" or house.store._store.read(found.key) == found.record


def test_a_damaged_record_is_never_absent(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(house, "done")
    record = house.store._store.read(house.key)
    monkeypatch.setattr(house.store._store, "read", lambda key: replace(record, payload=None))

    with pytest.raises(CorruptRecord):
        status(house)


@pytest.mark.parametrize("state", STATES)
def test_a_store_that_forgot_is_asked_only_about_what_a_claim_could_run(house: House, state: str) -> None:
    begin(house, state)
    detector = Detector()
    engine = detecting(house, detector)

    assert STATES[state] == status_of(engine, [replace(house.request(), key_timestamp=5.0)]).state
    runs = STATES[state] in ("absent", "paused")
    assert ([(5.0, STATES[state] == "paused")] if runs else []) == detector.asked


@pytest.mark.parametrize("state", ("absent", "paused"))
def test_a_key_that_the_store_may_have_forgotten_is_not_called_absent(house: House, state: str) -> None:
    begin(house, state)

    with pytest.raises(StoreDataLoss):
        status_of(detecting(house, Detector(lost=True)), [house.request()])


def test_a_claim_from_before_a_loss_is_about_to_be_quarantined(house: House) -> None:
    begin(house, "paused")

    assert "outcome-unknown" == status_of(detecting(house, Detector(runs=False)), [house.request()]).state


def test_it_waits_for_the_end_of_the_claim(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Woken, not polled: here the first look would come after an hour."""
    monkeypatch.setattr("flask_idempotency.engine.waiting.FIRST_POLL_SECONDS", 3600.0)
    claim = house.won()
    slot, seated, found = house.around.waiters.slot, threading.Event(), []

    @contextmanager
    def take(key: StorageKey, *former: StorageKey, status: bool = False) -> Iterator[threading.Event | None]:
        with slot(key, *former, status=status) as event:
            seated.set()
            yield event

    monkeypatch.setattr(house.around.waiters, "slot", take)
    waiter = threading.Thread(target=lambda: found.append(status(house, wait=3600.0)))
    waiter.start()
    assert seated.wait(SECONDS)
    claim.complete(DONE)
    waiter.join(SECONDS)

    assert [("done", True)] == [(each.state, each.waited) for each in found]


@pytest.mark.parametrize("state", [state for state in STATES if state != "running"])
def test_it_does_not_wait_for_a_key_that_is_not_in_flight(house: House, state: str) -> None:
    begin(house, state)
    house.around.waiters.slot = None  # type: ignore[assignment,method-assign]

    assert not status(house, wait=3600.0).waited


def test_it_waits_no_longer_than_it_is_told(house: House) -> None:
    house.won(lease=60)
    house.slow_reads(2)

    found = status(house, wait=5.0)

    assert ("in-flight", True) == (found.state, found.waited)
    assert {"claim", "read"} == set(house.store.calls)


def test_without_a_free_slot_it_answers_at_once(house: House) -> None:
    engine = Engine(replace(house.around, waiters=Waiters(0)))
    house.won()
    house.store.calls.clear()

    found = status_of(engine, [house.request()], wait=3600.0)

    assert ("in-flight", False) == (found.state, found.waited)
    assert ["read"] == house.store.calls


def test_it_takes_a_seat_of_those_that_wait_for_this_key(house: House) -> None:
    house.won()
    waiters = house.around.waiters
    with ExitStack() as seats:
        for _ in range(SLOTS_PER_KEY):
            assert seats.enter_context(waiters.slot(house.key)) is not None

        assert not status(house, wait=3600.0).waited


def test_a_store_that_fails_while_it_waits_is_asked_again(house: House) -> None:
    claim, read = house.won(), house.store._store.read
    looks = iter([None, StoreUnavailable, StoreDataLoss])

    def look(key: StorageKey) -> object:
        error: Any = next(looks, "over")
        if error == "over":
            claim.complete(DONE)
        elif error is not None:
            raise error("down", **({"loss": "changed"} if error is StoreDataLoss else {}))
        return read(key)

    house.store._store.read = look

    assert "done" == status(house, wait=3600.0).state


def test_a_store_that_stays_away_is_not_answered_for(house: House) -> None:
    house.won(lease=600)
    read, looks = house.store._store.read, []

    def look(key: StorageKey) -> object:
        house.clock.advance(2)
        looks.append(key)
        if len(looks) > 1:
            raise StoreUnavailable("down")
        return read(key)

    house.store._store.read = look

    with pytest.raises(StoreUnavailable):
        status(house, wait=5.0)


def test_a_key_whose_lease_ends_while_it_waits_is_said_to_be_paused(house: House) -> None:
    house.won(effects="marked")
    house.slow_reads(31)

    assert "paused" == status(house, wait=60.0).state
    record = house.store._store.read(house.key)
    assert (State.PROCESSING, 1) == (record.state, record.attempt)
