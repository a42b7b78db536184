"""The janitor and the steps of requests: which resolver it asks, what that may settle, and which requests no retry resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Event, Quarantined, Resolved, StepSettled
from flask_idempotency.engine.journal import NEVER_RESUMED, STEPS_CHANGED, Effects, Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, State
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import NeverHappened, Resolution, Resume, Settler, UnknownOutcome
from flask_idempotency.engine.store import StepContext
from flask_idempotency.maintenance.janitor import expire
from flask_idempotency.maintenance.reap import ReapReport, ResolverContext, reap
from flask_idempotency.steps import values
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
)
from flask_idempotency.web.recorded_steps import as_stored, read_steps
from tests.backends import MakeStore
from tests.maintenance.yard import label, still

POLICY = Policy(lease=LEASE, max_runtime=60.0)
WITHIN = 3600.0


class Checkout:
    """Requests that take steps, and the janitor that finds them."""

    def __init__(self, store: Any, clock: FrozenClock) -> None:
        self.store, self.clock, self.codec = store, clock, EnvelopeCodec(compression=None)
        self.events: list[Event] = []
        self.asked: list[UnknownOutcome] = []
        self.resolver: Any = None

    def begun(self, *steps: Entry) -> tuple[StorageKey, bytes, int]:
        """Claim a key, and enter these steps."""
        key, token = a_key(), a_token()
        grant = self.store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE)
        assert isinstance(grant, Grant)
        self.write(key, token, grant.fence, *steps)
        return key, token, grant.fence

    def write(self, key: StorageKey, token: bytes, fence: int, *steps: Entry, number: int = 1) -> None:
        sealed = [self.sealed(key, fence, step) for step in steps]
        writing = JournalWrite(number, sealed, steps=len(steps), in_doubt=any(step.in_doubt for step in steps))
        self.store.journals.write(key, token, fence=fence, writing=writing, lease=LEASE)

    def sealed(self, key: StorageKey, fence: int, step: Entry) -> Entry:
        context = StepContext(key, step.id, fence, FINGERPRINT, step.effects, step.digest, step.state.value)
        result = b'"secret"' if step.state is StepState.FINISHED else None
        return replace(step, payload=self.codec.steps.seal(b'"line-1"', result, context))

    def sweep(self) -> int:
        """Return how many journals were removed that no record needs."""
        store = self.store
        return expire(store.expiry, horizon=0.0, drain=still(), journals=store.journals).journals

    def reap(self) -> ReapReport:
        observers = Observers([self.events.append])
        settler = Settler(self.store.recovery, self.codec, observers, label=label, journals=self.store.journals)

        def downstream(found: SeenRecord, name: str, item: bytes = b"") -> str:
            return f"{name} of {item.decode()}"

        def resolve(unknown: UnknownOutcome) -> Resolution:
            self.asked.append(unknown)
            said: Resolution = self.resolver(unknown)
            return as_stored(said, POLICY)

        context = ResolverContext(
            resolvers={} if self.resolver is None else {ABOUT.operation: resolve},
            policy_of=lambda about: POLICY,
            settler=settler,
            downstream=downstream,
            steps=lambda found: read_steps(found, self.store.journals, self.codec, downstream=downstream),
        )
        return reap(
            self.store.recovery,
            horizon=self.clock.now,
            drain=still(),
            observers=observers,
            label=label,
            resolving=context,
            journals=self.store.journals,
            resume_within=lambda about: WITHIN,
        )

    def result(self, key: StorageKey, step: Entry) -> Any:
        """Return what a retry would get for this step."""
        (entry,) = [entry for entry in self.store.journals.read(key).entries if entry.id == step.id]
        assert entry.state is StepState.FINISHED
        assert entry.payload is not None
        context = StepContext(key, entry.id, entry.fence, FINGERPRINT, entry.effects, entry.digest, entry.state.value)
        item, result = self.codec.steps.open(entry.payload, context)
        assert (b'"line-1"', True) == (item, result is not None)
        return values.decode(result or b"")

    def resumes(self, key: StorageKey) -> bool:
        request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
        return isinstance(self.store.claim(request, token=a_token(), lease=LEASE), Grant)


def a_step(name: str, effects: Effects = "plain", state: StepState = StepState.BEGUN) -> Entry:
    return Entry(name.encode().ljust(12, b"."), name, effects, state, in_line=True, digest=b"d" * 16)


CHARGE = a_step("charge")
RESERVED = a_step("reserve", "deduplicated", StepState.FINISHED)


@pytest.fixture
def checkout(make_empty: MakeStore, clock: FrozenClock) -> Checkout:
    return Checkout(make_empty(clock), clock)


def in_doubt(checkout: Checkout, *more: Entry) -> tuple[StorageKey, bytes, int]:
    """The worker has died in its charge, and cannot run any more. A janitor has asked once."""
    claimed = checkout.begun(RESERVED, CHARGE, *more)
    checkout.clock.advance(LEASE + 1)
    checkout.reap()
    checkout.clock.advance(POLICY.max_runtime + 60)
    return claimed


def test_a_resolver_sees_the_steps_and_never_a_result(checkout: Checkout) -> None:
    in_doubt(checkout)
    checkout.resolver = lambda unknown: unknown.step("charge", "line-1").never_happened()

    checkout.reap()

    reserve, charge = checkout.asked[0].steps
    assert ("reserve", "deduplicated", StepState.FINISHED, False) == (
        reserve.name,
        reserve.effects,
        reserve.state,
        reserve.in_doubt,
    )
    assert ("line-1", StepState.BEGUN, True, 1) == (charge.item, charge.state, charge.in_doubt, charge.attempt)
    assert 'charge of "line-1"' == charge.downstream_key
    assert "secret" not in repr(checkout.asked[0])
    with pytest.raises(LookupError, match="charge"):
        checkout.asked[0].step("charge", "line-2")


def test_a_step_that_happened_pauses_the_request_and_the_late_owner_has_lost(checkout: Checkout) -> None:
    key, token, fence = in_doubt(checkout)
    assert not checkout.resumes(key)
    checkout.resolver = lambda unknown: unknown.step("charge", "line-1").completed({"id": 7})

    assert 1 == checkout.reap().resumed
    assert {"id": 7} == checkout.result(key, CHARGE)
    before, journal = found(checkout.store, key), checkout.store.journals.read(key)
    checkout.reap()

    assert (before, journal, 1) == (found(checkout.store, key), checkout.store.journals.read(key), len(checkout.asked))
    settled = [event for event in checkout.events if isinstance(event, StepSettled | Resolved)]
    assert [("completed", "charge"), ("resumed", None)] == [
        (event.verb, getattr(event, "step", None)) for event in settled
    ]
    with pytest.raises(LeaseLost):
        checkout.write(key, token, fence, RESERVED, replace(CHARGE, state=StepState.FINISHED), number=2)
    assert checkout.resumes(key)


def test_the_request_stays_quarantined_until_no_step_is_in_doubt(checkout: Checkout) -> None:
    key, _, _ = in_doubt(checkout, a_step("refund"))
    checkout.resolver = lambda unknown: unknown.step("charge", "line-1").completed(1)

    assert 1 == checkout.reap().resumed
    assert State.QUARANTINED is found(checkout.store, key).state
    assert ["refund"] == [entry.name for entry in checkout.store.journals.read(key).entries if entry.in_doubt]

    checkout.resolver = lambda unknown: unknown.resume(unknown.step("refund", "line-1").never_happened())
    checkout.clock.advance(7200)
    assert 1 == checkout.reap().resumed
    assert ["charge", "reserve"] == sorted(entry.name for entry in checkout.store.journals.read(key).entries)
    assert checkout.resumes(key)


def test_never_happened_of_a_step_waits_for_its_worker(checkout: Checkout) -> None:
    key, _, _ = checkout.begun(CHARGE)
    checkout.clock.advance(LEASE + 1)
    checkout.resolver = lambda unknown: unknown.step("charge", "line-1").never_happened()

    assert 1 == checkout.reap().unknown
    assert State.QUARANTINED is found(checkout.store, key).state

    checkout.clock.advance(POLICY.max_runtime + 60)
    assert 1 == checkout.reap().resumed
    assert () == checkout.store.journals.read(key).entries


def test_never_happened_of_a_request_with_effects_is_an_error_that_changes_nothing(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    key, _, _ = in_doubt(checkout)
    checkout.resolver = lambda unknown: NeverHappened()
    before = checkout.store.journals.read(key)

    assert (1, 0) == ((report := checkout.reap()).failed, report.released)

    assert "reserve, charge" in caplog.text
    assert (State.QUARANTINED, before) == (found(checkout.store, key).state, checkout.store.journals.read(key))


def test_resume_takes_back_a_quarantine_and_no_doubt(checkout: Checkout) -> None:
    key, token, _ = checkout.begun(RESERVED)
    checkout.store.quarantine(key, token, STEPS_CHANGED)
    doubtful, _, _ = checkout.begun(CHARGE)
    checkout.clock.advance(LEASE + 1)
    checkout.resolver = lambda unknown: Resume()

    report = checkout.reap()

    assert (1, 1) == (report.resumed, report.failed)
    assert State.QUARANTINED is found(checkout.store, doubtful).state
    assert checkout.resumes(key)


def test_a_paused_request_is_given_up_when_its_time_is_over(checkout: Checkout) -> None:
    key, token, _ = checkout.begun(RESERVED)
    assert State.PROCESSING is checkout.store.release(key, token)
    plain, plain_token = a_key(), a_token()
    checkout.store.claim(a_request(plain, on_expiry=OnExpiry.TAKEOVER), token=plain_token, lease=LEASE)
    checkout.clock.advance(WITHIN - 1)
    assert (0, 2) == ((early := checkout.reap()).never_resumed, early.waiting)

    checkout.clock.advance(LEASE + 1)
    checkout.resolver = lambda unknown: Resume()
    report = checkout.reap()

    assert (1, 1, 1) == (report.never_resumed, report.waiting, report.resumed)
    assert NEVER_RESUMED == checkout.asked[0].record.reason
    held = [event for event in checkout.events if isinstance(event, Quarantined)]
    assert [Quarantined(label(key), ABOUT.operation, NEVER_RESUMED)] == held
    assert State.PROCESSING is found(checkout.store, plain).state
    assert checkout.resumes(key)


def test_a_journal_without_its_request_is_swept(checkout: Checkout) -> None:
    kept, _, _ = checkout.begun(RESERVED)
    gone, token, _ = checkout.begun(RESERVED)
    # As a release that does not know journals would do.
    checkout.store.complete(gone, token, PAYLOAD, keep=WITHIN)

    checkout.sweep()

    assert [] == [answer for answer in checkout.store.journals.walk(limit=10).answers if answer.key == gone]
    assert 1 == len(checkout.store.journals.read(kept).entries)
    assert 0 == checkout.sweep()
