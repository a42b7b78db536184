"""When a record's owner was last heard of, and whether it may still be at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flask_idempotency.engine.record import Record, State

LAPSED: Final = "lease-expired"
"""The reason of a quarantine that nobody's word has led to: the lease ended, and the owner was silent."""


def as_of(record: Record, horizon: float) -> Record:
    """This record by the earlier of two clocks: the store's, and `horizon` (seconds since the epoch).

    A clock that was set forward makes every owner look long gone. Answers have the store's time, and no other.
    """
    if record.state is State.COMPLETED:
        return record
    return replace(record, remaining=max(record.remaining, record.deadline - horizon))


def last_seen(record: Record, *, lease: float) -> float:
    """Seconds since the owner claimed or renewed, if it did so for `lease` seconds. Never below 0."""
    return max(lease - record.remaining, 0.0)


def may_live_for(record: Record, *, max_runtime: float) -> float:
    """For how many more seconds the owner, or what it has sent, may be at work: 0 when it has settled the record.

    An owner that was renewed until a moment ago may be frozen, or cut off from the store, and may come back. After
    `max_runtime` nothing renews it, so its work was to be over by then. It is counted from the end of the lease and not
    from its beginning, for nobody knows how long a lease the owner was given. One that is frozen for longer still is not
    ruled out, by this or by anything else.

    One that has said itself that it does not know is not at work any more. But the commonest reason for that is a request
    to somebody else that has timed out, and may still be on its way: so the rest of its lease is waited for.
    """
    if record.state is State.COMPLETED or record.payload is not None:
        # Of an answer that nobody can open, too, the deadline is its own and no lease's.
        return 0.0
    silent = record.state is State.PROCESSING or record.reason == LAPSED
    return max(record.remaining + (max_runtime if silent else 0.0), 0.0)
