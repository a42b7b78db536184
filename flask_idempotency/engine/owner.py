"""When a record's owner was last heard of, and whether it may still be at work."""

from __future__ import annotations

from typing import Final

from flask_idempotency.engine.record import Record, State

LAPSED: Final = "lease-expired"
"""The reason of a quarantine that nobody's word has led to: the lease ended, and the owner was silent."""


def last_seen(record: Record, *, lease: float) -> float:
    """Seconds since the owner claimed or renewed, by the store's clock, if it did so for `lease` seconds. Never below 0."""
    return max(lease - record.remaining, 0.0)


def may_live_for(record: Record, *, lease: float, max_runtime: float) -> float:
    """For how many more seconds the owner may be at work: 0 when it has settled the record, or said that it cannot.

    An owner that was renewed until a moment ago may be frozen, or cut off from the store, and may come back. After
    `max_runtime` nothing renews it, so its work was to be over by then. One that is frozen for longer still is not ruled
    out, by this or by anything else.
    """
    if record.state is State.COMPLETED or (record.state is State.QUARANTINED and record.reason != LAPSED):
        return 0.0
    return max(record.remaining, max_runtime - last_seen(record, lease=lease), 0.0)
