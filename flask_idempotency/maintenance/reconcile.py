"""Counting again what ledgers say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flask_idempotency.engine.upkeep import Ledger


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


def reconcile(
    ledger: Ledger, *, tids: Iterable[bytes] | None = None, pause: Callable[[], None] = lambda: None
) -> Reconciliation:
    """Count the records of these tenants again, of all by default, and put their ledgers right.

    `pause` is called after every tenant. Raises `StoreUnavailable` when the store does not answer.
    """
    drifts = []
    for tid in ledger.tenants() if tids is None else tids:
        drifts.append(ledger.reconcile(tid))
        pause()
    return Reconciliation(
        tenants=len(drifts),
        drifted=sum(not drift.none for drift in drifts),
        records=sum(abs(drift.records) for drift in drifts),
        bytes=sum(abs(drift.bytes) for drift in drifts),
        unsettled=sum(abs(drift.unsettled) for drift in drifts),
        busy=sum(drift.busy for drift in drifts),
    )
