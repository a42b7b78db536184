"""When a record's owner was last heard of, and whether it may still be at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.record import Record, State

SILENT_LEASES: Final = 3
"""For how many leases an owner must not have renewed, to count as gone for a person who releases its key."""

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


def releasable_in(record: Record, policy: Policy) -> float:
    """Seconds until a person may release this key without `--force`: 0 if they may now.

    If a second run does no harm (`deduplicated`, `transactional`), an owner counts as gone once it has not renewed its
    lease for three leases: it renews three times in each, and the next retry takes the key over when the first one ends.
    Only if the claim was made under the rule that the policy has now. Otherwise as `may_live_for`.
    """
    wait = policy.max_runtime
    if policy.effects in ("deduplicated", "transactional") and record.on_lapse is policy.on_lapse:
        # The end of the lease is in the record. Its beginning is not.
        wait = min(wait, (SILENT_LEASES - 1) * policy.lease)
    return may_live_for(record, max_runtime=wait)
