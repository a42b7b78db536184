"""Any sequence of calls, against a model small enough to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.model import (
    Claimed,
    Grant,
    InFlight,
    Mismatched,
    OnLapse,
    Payload,
    Replayed,
    State,
    Unknown,
)
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    a_key,
    a_request,
    a_token,
    near,
)

MACHINE_EXAMPLES = 25
MACHINE_STEPS = 30

fingerprints = st.sampled_from((FINGERPRINT, OTHER_FINGERPRINT))
machine_durations = st.integers(1, 40)
payloads = st.builds(
    Payload,
    data=st.binary(max_size=8),
    status=st.sampled_from((200, 204, 422)),
    success=st.booleans(),
    byte_size=st.integers(0, 9),
)


@dataclass(frozen=True)
class Row:
    """What the model remembers of a key that is in use. Whole seconds, so that nothing is rounded."""

    state: State
    token: bytes
    attempt: int
    fingerprint: bytes
    on_lapse: OnLapse
    first_seen: float
    deadline: float
    payload: Payload | None = None
    reason: str = ""


Lost: TypeAlias = bool


class Model:
    """The table of transitions in `engine/record.py`, in the fewest words."""

    def __init__(self, clock: FrozenClock) -> None:
        self._clock = clock
        self._row: Row | None = None

    @property
    def row(self) -> Row | None:
        if self._row and self._row.state is State.COMPLETED and self._row.deadline <= self._clock.now:
            self._row = None
        return self._row

    def claim(self, token: bytes, fingerprint: bytes, on_lapse: OnLapse, lease: int) -> object:
        now, row = self._clock.now, self.row
        fresh = Row(State.PROCESSING, token, 1, fingerprint, on_lapse, now, now + lease)
        if row is None:
            self._row = fresh
            return Claimed, 1
        if row.fingerprint != fingerprint:
            return Mismatched, row.first_seen
        if row.state is State.COMPLETED:
            return Replayed, row.payload
        if row.state is State.QUARANTINED:
            return Unknown, row.reason
        if row.token == token:
            return Claimed, row.attempt
        if row.deadline > now:
            return InFlight, row.deadline - now
        if row.on_lapse is OnLapse.TAKEOVER:
            self._row = replace(fresh, attempt=row.attempt + 1, first_seen=row.first_seen)
            return Claimed, row.attempt + 1
        self._row = replace(row, state=State.QUARANTINED, reason="lease-expired")
        return Unknown, "lease-expired"

    def renew(self, token: bytes, lease: int) -> Lost:
        row = self.row
        if row is None or row.token != token:
            return True
        if row.state is State.PROCESSING or row.reason == "lease-expired":
            self._row = replace(row, deadline=max(row.deadline, self._clock.now + lease))
        return False

    def mark(self, token: bytes) -> Lost:
        row = self.row
        if row is None or row.token != token or row.state is State.COMPLETED:
            return True
        if row.state is State.PROCESSING:
            self._row = replace(row, on_lapse=OnLapse.QUARANTINE)
        return False

    def complete(self, token: bytes, payload: Payload, keep: int) -> Lost:
        row = self.row
        if row is None or row.token != token:
            return True
        if row.state is not State.COMPLETED:
            deadline = self._clock.now + keep
            self._row = replace(row, state=State.COMPLETED, deadline=deadline, payload=payload, reason="")
        return False

    def release(self, token: bytes) -> Lost:
        row = self.row
        if row is not None and (row.token != token or row.state is State.COMPLETED):
            return True
        self._row = None
        return False

    def hold(self, token: bytes, reason: str) -> Lost:
        row = self.row
        if row is None or row.token != token or row.state is State.COMPLETED:
            return True
        if row.state is State.PROCESSING:
            self._row = replace(row, state=State.QUARANTINED, reason=reason)
        return False


class StoreMachine(RuleBasedStateMachine):
    """Does the same to a store and to the model, on a key of its own, and compares answers and records."""

    tokens = Bundle("tokens")

    def __init__(self, store: Store, clock: FrozenClock) -> None:
        super().__init__()
        self.store, self.clock = store, clock
        self.model = Model(clock)
        self.key = a_key()
        self.fences: list[tuple[bytes, int]] = []
        self.released = set[bytes]()

    @initialize(target=tokens)
    def first_token(self) -> bytes:
        return a_token()

    @rule(target=tokens)
    def another_token(self) -> bytes:
        return a_token()

    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(token=tokens, fingerprint=fingerprints, on_lapse=st.sampled_from(OnLapse), lease=machine_durations)
    def claim(self, token: bytes, fingerprint: bytes, on_lapse: OnLapse, lease: int) -> None:
        # What becomes of a claim that was given up is not for a model without a past: see `GivingUp`.
        if token in self.released:
            return
        request = a_request(self.key, fingerprint=fingerprint, on_lapse=on_lapse)
        expected = self.model.claim(token, fingerprint, on_lapse, lease)
        match self.store.claim(request, token=token, lease=lease):
            case Claimed(grant):
                assert expected == (Claimed, grant.attempt)
                self._see_fence(grant)
            case Replayed(record):
                assert expected == (Replayed, record.payload)
            case InFlight(retry_after):
                assert expected == (InFlight, near(retry_after))
            case Mismatched(first_seen):
                assert expected == (Mismatched, near(first_seen))
            case Unknown(reason):
                assert expected == (Unknown, reason)

    @rule(token=tokens, lease=machine_durations)
    def renew(self, token: bytes, lease: int) -> None:
        assert self.model.renew(token, lease) == lost(lambda: self.store.renew(self.key, token, lease=lease))

    @rule(token=tokens)
    def mark(self, token: bytes) -> None:
        assert self.model.mark(token) == lost(lambda: self.store.mark(self.key, token))

    @rule(token=tokens, payload=payloads, keep=machine_durations)
    def complete(self, token: bytes, payload: Payload, keep: int) -> None:
        expected = self.model.complete(token, payload, keep)
        assert expected == lost(lambda: self.store.complete(self.key, token, payload, keep=keep))

    @rule(token=tokens)
    def release(self, token: bytes) -> None:
        self.released.add(token)
        assert self.model.release(token) == lost(lambda: self.store.release(self.key, token))

    @rule(token=tokens, reason=st.sampled_from(("lost", "crashed")))
    def hold(self, token: bytes, reason: str) -> None:
        assert self.model.hold(token, reason) == lost(lambda: self.store.hold(self.key, token, reason))

    @invariant()
    def the_record_is_as_modelled(self) -> None:
        record, row = self.store.read(self.key), self.model.row
        if record is None or row is None:
            assert (row, record) == (None, None)
            return
        assert (row.state, row.token, row.attempt) == (record.state, record.token, record.attempt)
        assert (row.fingerprint, row.on_lapse, row.reason) == (record.fingerprint, record.on_lapse, record.reason)
        assert (near(row.deadline), near(row.first_seen)) == (record.deadline, record.requested_at)
        assert row.payload == record.payload

    def _see_fence(self, grant: Grant) -> None:
        if not self.fences or (grant.token, grant.fence) != self.fences[-1]:
            assert all(grant.fence > fence for _, fence in self.fences)
            self.fences.append((grant.token, grant.fence))


def lost(write: Callable[[], None]) -> Lost:
    try:
        write()
    except LeaseLost:
        return True
    return False


def run(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Many short lives of this machine, the same on a laptop and in CI: no deadline, and no memory of earlier runs."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Modelled:
    """What no example above thought of."""

    def test_any_sequence_of_calls_ends_as_modelled(self, store: Store, clock: FrozenClock) -> None:
        """A store and a hundred lines that anybody can check agree on every answer and every record."""

        class ThisStoreMachine(StoreMachine):
            def __init__(self) -> None:
                super().__init__(store, clock)

        run(ThisStoreMachine, examples=MACHINE_EXAMPLES, steps=MACHINE_STEPS)
