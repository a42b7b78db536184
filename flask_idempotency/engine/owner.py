"""When a record's owner was last heard of, and whether it may still be at work."""

from __future__ import annotations

from typing import Final

from flask_idempotency.engine.record import Record, State

LAPSED: Final = "lease-expired"
"""The reason of a quarantine that nobody's word has led to: the lease ended, and the owner was silent."""


def last_seen(record: Record, *, lease: float, horizon: float | None = None) -> float:
    """Seconds since the owner claimed or renewed, if it did so for `lease` seconds. Never below 0.

    By the store's clock; and by `horizon` (seconds since the epoch), where that is earlier: a clock that was set forward
    makes every owner look long gone.
    """
    return max(lease - _remaining(record, horizon), 0.0)


def may_live_for(record: Record, *, lease: float, max_runtime: float, horizon: float | None = None) -> float:
    """For how many more seconds the owner may be at work: 0 when it has settled the record, or said that it cannot.

    An owner that was renewed until a moment ago may be frozen, or cut off from the store, and may come back. After
    `max_runtime` nothing renews it, so its work was to be over by then. One that is frozen for longer still is not ruled
    out, by this or by anything else. `horizon` as for `last_seen`.
    """
    if record.state is State.COMPLETED or (record.state is State.QUARANTINED and record.reason != LAPSED):
        return 0.0
    seen = last_seen(record, lease=lease, horizon=horizon)
    return max(_remaining(record, horizon), max_runtime - seen, 0.0)


def _remaining(record: Record, horizon: float | None) -> float:
    return record.remaining if horizon is None else max(record.remaining, record.deadline - horizon)
