"""Counting again what ledgers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flask_idempotency.engine.capabilities import Ledger
from flask_idempotency.maintenance.drain import Did, Drain

TENANTS_AT_ONCE: Final = 20
"""Each is recounted by itself, and may have a million records."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What the recount has found. Everything but `tenants` and `busy` is 0 unless records were changed by hand."""

    tenants: int = 0
    drifted: int = 0
    """Tenants whose ledger was wrong, and is right now."""
    records: int = 0
    bytes: int = 0
    unsettled: int = 0
    """By how much it was wrong: what was counted too much less what was counted too little, taken as it is per tenant."""
    busy: int = 0
    """Buckets that changed while they were counted, and are looked at next time."""
    shrunk: int = 0
    finished: bool = True


def reconcile(ledger: Ledger, *, drain: Drain, tids: Iterable[bytes] | None = None) -> Reconciliation:
    """Count the records of these tenants again, of all by default, and put their ledgers right.

    Raises `StoreUnavailable` when the store does not answer; the ledgers that were put right until then stay right.
    """
    left = list(ledger.tenants() if tids is None else tids)
    counts: Counter[str] = Counter()

    def step(limit: int) -> Did:
        batch = left[-min(limit, TENANTS_AT_ONCE) :]
        for tid in batch:
            drift = ledger.reconcile(tid)
            left.remove(tid)
            counts.update(tenants=1, drifted=int(not drift.none), busy=drift.busy)
            counts.update(records=abs(drift.records), bytes=abs(drift.bytes), unsettled=abs(drift.unsettled))
        return Did(len(batch), more=bool(left))

    drained = drain.run(step)
    return Reconciliation(**counts, shrunk=drained.shrunk, finished=drained.finished)
