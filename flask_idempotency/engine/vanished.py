"""Say how long a worker that vanished may still run, and when an operator may free its key."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flask_idempotency.engine.model import LAPSED, Record, State
from flask_idempotency.engine.policy import Policy

SILENT_LEASES: Final = 3
"""How many leases a worker must let pass without renewal before an operator may release its key."""


def clamp_clock(record: Record, horizon: float) -> Record:
    """Return this record by the earlier of two clocks: the store's, and `horizon` (seconds since the epoch).

    If the store's clock jumps ahead, every lease looks long expired. Completed records keep the store's time.
    """
    if record.state is State.COMPLETED:
        return record
    return replace(record, remaining=max(record.remaining, record.deadline - horizon))


def idle_seconds(record: Record, *, lease: float) -> float:
    """Return the seconds since the worker claimed or renewed, if it did so for `lease` seconds. Never below 0."""
    return max(lease - record.remaining, 0.0)


def max_remaining(record: Record, *, max_runtime: float) -> float:
    """Return for how many more seconds the worker or its calls may run: 0 once it has ended the record.

    A worker that renewed a moment ago may be frozen or cut off from the store, and may come back. It renews for at most
    `max_runtime`, so its work should be over by then. That time counts from the end of the lease, because the record does
    not say how long the lease was. No time limit can rule out a worker that is frozen for longer.

    A worker that quarantined its own record runs no more. But the usual reason is a call to another service that timed out
    and may still arrive, so the rest of the lease counts.
    """
    if record.state is State.COMPLETED or record.payload is not None:
        # Also if the response is unreadable: then the deadline is that of the response, and not of a lease.
        return 0.0
    silent = record.state is State.PROCESSING or record.reason == LAPSED
    return max(record.remaining + (max_runtime if silent else 0.0), 0.0)


def releasable_in(record: Record, policy: Policy) -> float:
    """Return the seconds until an operator may release this key without `--force`: 0 if they may now.

    If a second run does no harm (`deduplicated`, `transactional`), a worker counts as gone after three leases without
    renewal. It renews three times in each, and the next retry takes over when the first one expires. This holds only if the
    claim was made under the policy's present rule. Otherwise the result is that of `max_remaining`.
    """
    wait = policy.max_runtime
    if policy.effects in ("deduplicated", "transactional") and record.on_expiry is policy.on_expiry:
        # The end of the lease is in the record. Its beginning is not.
        wait = min(wait, (SILENT_LEASES - 1) * policy.lease)
    return max_remaining(record, max_runtime=wait)
