"""Whether an owner may still be at work: what others may know of it, and by which clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency.engine.model import CORRUPT, LAPSED, NO_INFO, OnExpiry, Record, State
from flask_idempotency.engine.vanished import clamp_clock, idle_seconds, max_remaining
from flask_idempotency.testing.contract.support import FINGERPRINT, PAYLOAD

NOW = 1_800_000_000.0
LEASE, MAX_RUNTIME = 30.0, 900.0


def record(state: State, *, remaining: float, reason: str = "") -> Record:
    """As a store tells it at NOW."""
    return Record(
        state=state,
        token=b"t" * 16,
        fence=1,
        attempt=1,
        fingerprint=FINGERPRINT,
        on_expiry=OnExpiry.QUARANTINE,
        info=NO_INFO,
        requested_at=NOW - 100,
        deadline=NOW + remaining,
        remaining=remaining,
        reason=reason,
    )


def may_live(record: Record) -> float:
    return max_remaining(record, max_runtime=MAX_RUNTIME)


@pytest.mark.parametrize(
    ("remaining", "seconds"), ((30.0, 0.0), (20.0, 10.0), (0.0, 30.0), (-70.0, 100.0), (45.0, 0.0))
)
def test_an_owner_was_last_seen_when_it_claimed_or_renewed(remaining: float, seconds: float) -> None:
    assert seconds == idle_seconds(record(State.PROCESSING, remaining=remaining), lease=LEASE)


@pytest.mark.parametrize(
    ("remaining", "seconds"), ((30.0, 930.0), (-10.0, 890.0), (-899.0, 1.0), (-900.0, 0.0), (-1e9, 0.0))
)
@pytest.mark.parametrize("state", (State.PROCESSING, State.QUARANTINED))
def test_a_silent_owner_may_live_as_long_as_a_view_may_run(state: State, remaining: float, seconds: float) -> None:
    """Since its lease ended: it may be frozen, or cut off from the store, and come back."""
    reason = LAPSED if state is State.QUARANTINED else ""

    assert seconds == may_live(record(state, remaining=remaining, reason=reason))


@pytest.mark.parametrize("remaining", (30.0, -10.0))
def test_an_owner_that_has_completed_its_record_is_not_waited_for(remaining: float) -> None:
    """Its work is over, and its answer's life is another thing than a lease. Nor when nobody can open that answer."""
    answered = replace(record(State.COMPLETED, remaining=remaining), payload=PAYLOAD)

    assert may_live(answered) == 0.0
    assert may_live(replace(answered, state=State.QUARANTINED, reason=CORRUPT)) == 0.0


@pytest.mark.parametrize(("remaining", "seconds"), ((30.0, 30.0), (-10.0, 0.0)))
def test_of_an_owner_that_does_not_know_the_lease_is_waited_for(remaining: float, seconds: float) -> None:
    """It is not at work any more; what it has sent to somebody may still be on its way."""
    assert seconds == may_live(record(State.QUARANTINED, remaining=remaining, reason="view-crashed"))


def test_a_clock_that_was_set_forward_declares_no_owner_dead() -> None:
    """The store says that its lease ended long ago; the horizon, that it was seen ten seconds ago."""
    claimed = replace(record(State.QUARANTINED, remaining=-2 * 86400.0, reason=LAPSED), deadline=NOW + LEASE)

    assert may_live(claimed) == 0.0
    seen = clamp_clock(claimed, NOW + 10)
    assert idle_seconds(seen, lease=LEASE) == 10.0
    assert may_live(seen) == LEASE - 10 + MAX_RUNTIME


def test_a_horizon_that_is_ahead_says_nothing() -> None:
    claimed = record(State.PROCESSING, remaining=20.0)

    assert claimed == clamp_clock(claimed, NOW + 1e6)


def test_the_life_of_an_answer_has_one_clock() -> None:
    answered = record(State.COMPLETED, remaining=-1.0)

    assert answered == clamp_clock(answered, NOW - 1e6)
