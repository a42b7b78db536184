"""Each change that a `Settler` makes, or may have made, stands in the audit trail, and its failure hides no change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import CorruptRecord, NotApplied, StoreUnavailable
from flask_idempotency.engine.events import Event, Resolved, StepSettled
from flask_idempotency.engine.journal import Entry, Journal, JournalWrite, StepState
from flask_idempotency.engine.model import CORRUPT, SealContext, State, StoredResponse
from flask_idempotency.engine.recovery import SeenStep, SettledStep, Settler
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, a_key, a_request, a_token, found, granted

PAID = StoredResponse(201, body=b"paid")
WHY: dict[str, Any] = {"actor": "alice", "reason": "ticket 7"}


@dataclass
class Office:
    """A store, and an operator who settles in it."""

    store: MemoryStore
    events: list[Event] = field(default_factory=list)

    def settler(self, audit: Any = None) -> Settler:
        return Settler(
            self.store.recovery,
            EnvelopeCodec(),
            self.events.append,
            label=lambda key: "label",
            journals=self.store.journals,
            audit=self.store.audit if audit is None else audit,
        )

    def held(self, reason: str = "view-crashed") -> SeenRecord:
        key, token = a_key(), a_token()
        granted(self.store.claim(a_request(key), token=token, lease=LEASE))
        self.store.quarantine(key, token, reason)
        return SeenRecord(key, found(self.store, key))

    def trail(self, seen: SeenRecord) -> list[AuditEntry]:
        return [replace(entry, at=0.0) for entry in self.store.audit.entries(seen.key)]


@pytest.fixture
def office(clock: FrozenClock) -> Office:
    return Office(MemoryStore(clock))


def test_a_completion_and_a_release_are_in_the_trail(office: Office, clock: FrozenClock) -> None:
    held = office.held()
    office.settler().complete(held, PAID, keep=KEEP, **WHY)
    clock.advance(5)
    completed = SeenRecord(held.key, found(office.store, held.key))
    office.settler().force_release(completed, forced=True, **WHY)

    assert [
        AuditEntry("completed", "quarantined", "alice", "ticket 7"),
        AuditEntry("released", "completed", "alice", "ticket 7", forced=True),
    ] == office.trail(held)
    assert [clock.now - 5, clock.now] == [entry.at for entry in office.store.audit.entries(held.key)]
    assert office.store.audit.count("alice", seconds=60) == 2


def test_a_change_that_did_not_happen_is_not_in_the_trail(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    held = office.held()
    office.settler().force_release(held, **WHY)
    assert not office.settler().complete(held, PAID, keep=KEEP, **WHY)
    other = office.held()
    for error in (NotApplied("down"), CorruptRecord("none of ours")):
        monkeypatch.setattr(office.store.recovery, "force_release", raising(error))
        with pytest.raises(type(error)):
            office.settler().force_release(other, **WHY)

    assert (1, []) == (len(office.trail(held)), office.trail(other))


@pytest.mark.parametrize("error", (StoreUnavailable("down"), KeyboardInterrupt(), TimeoutError()))
def test_a_change_in_doubt_is_in_the_trail_as_such(
    office: Office, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    held = office.held()
    monkeypatch.setattr(office.store.recovery, "resolve", raising(error))
    with pytest.raises(type(error)):
        office.settler().complete(held, PAID, keep=KEEP, **WHY)

    assert [AuditEntry("completed", "quarantined", "alice", "ticket 7", certain=False)] == office.trail(held)


def test_each_settled_step_is_in_the_trail(office: Office) -> None:
    seen, journal, steps = in_steps(office, "charge", "mail")
    settled = [SettledStep(steps[0], happened=True, result=b'"id 7"'), SettledStep(steps[1], happened=False)]

    assert office.settler().resume(seen, journal, settled, **WHY)

    assert [
        AuditEntry("completed", "quarantined", "alice", "ticket 7", "charge"),
        AuditEntry("never-happened", "quarantined", "alice", "ticket 7", "mail"),
        AuditEntry("resumed", "quarantined", "alice", "ticket 7"),
    ] == office.trail(seen)
    assert [StepSettled, StepSettled, Resolved] == [type(event) for event in office.events]


def test_a_step_that_leaves_another_in_doubt_is_in_the_trail_alone(office: Office) -> None:
    seen, journal, steps = in_steps(office, "charge", "mail")

    office.settler().resume(seen, journal, [SettledStep(steps[1], happened=False)], **WHY)

    assert [("mail", "never-happened")] == [(entry.step, entry.verb) for entry in office.trail(seen)]


class Broken:
    """An audit trail whose store is away, or that is badly written."""

    def __init__(self, error: Exception) -> None:
        self.append = raising(error)


@pytest.mark.parametrize("error", (StoreUnavailable("secret text"), ZeroDivisionError("secret text")))
def test_a_trail_that_fails_neither_undoes_nor_hides_the_change(
    office: Office, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    held = office.held()

    with caplog.at_level(logging.ERROR, logger="flask_idempotency"):
        assert office.settler(Broken(error)).complete(held, PAID, keep=KEEP, **WHY)

    assert State.COMPLETED is found(office.store, held.key).state
    assert ["completed"] == [event.verb for event in office.events if isinstance(event, Resolved)]
    (line,) = caplog.messages
    assert line == (
        f"the audit trail of record label lacks a change (completed): the store failed with {type(error).__name__}"
    )


def test_a_trail_that_fails_does_not_hide_the_error_of_the_change(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = office.held()
    monkeypatch.setattr(office.store.recovery, "resolve", raising(StoreUnavailable("of the change")))

    with pytest.raises(StoreUnavailable, match="of the change"):
        office.settler(Broken(StoreUnavailable("of the trail"))).complete(held, PAID, keep=KEEP, **WHY)


def test_a_reopened_record_is_in_the_trail(office: Office) -> None:
    key, token = a_key(), a_token()
    grant = granted(office.store.claim(a_request(key), token=token, lease=LEASE))
    payload = EnvelopeCodec().seal(PAID, SealContext(key, token, grant.fence, a_request(key).fingerprint))
    office.store.complete(key, token, payload, keep=KEEP)
    office.store.mark_corrupt(key, payload)
    seen = SeenRecord(key, found(office.store, key))
    assert CORRUPT == seen.record.reason

    office.settler().reopen(seen, keep=KEEP, **WHY)

    assert [AuditEntry("reopened", "quarantined", "alice", "ticket 7")] == office.trail(seen)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


def in_steps(office: Office, *names: str) -> tuple[SeenRecord, Journal, list[SeenStep]]:
    """A quarantined request that has begun these plain steps, and has finished none."""
    key, token = a_key(), a_token()
    grant = granted(office.store.claim(a_request(key), token=token, lease=LEASE))
    entries = [Entry(name.encode().ljust(12, b"."), name, "plain", StepState.BEGUN, in_line=True) for name in names]
    writing = JournalWrite(1, entries, steps=len(entries), in_doubt=True)
    office.store.journals.write(key, token, fence=grant.fence, writing=writing, lease=LEASE)
    office.store.quarantine(key, token, "view-crashed")
    journal = office.store.journals.read(key)
    steps = [
        SeenStep(
            name=entry.name,
            item=None,
            effects=entry.effects,
            state=entry.state,
            attempt=1,
            began_at=0.0,
            finished_at=None,
            entry=entry,
            stored_item=b"",
            _downstream=str,
        )
        for entry in journal.entries
    ]
    return SeenRecord(key, found(office.store, key)), journal, steps
