"""Ledgers are counted again, and drift is said to be there."""

from __future__ import annotations

from flask_idempotency.engine.quota import Quota
from flask_idempotency.maintenance.janitor import Batcher, ReconcileReport, reconcile
from tests.maintenance.conftest import Office


def test_a_ledger_that_nobody_touched_has_not_drifted(office: Office) -> None:
    """All tenants are looked at, or those that were asked for."""
    keys = [office.answer(quota=Quota()) for _ in range(3)]
    office.claim(quota=Quota())

    assert ReconcileReport(tenants=4) == reconcile(office.store.ledger, drain=Batcher())
    assert ReconcileReport(tenants=1) == reconcile(office.store.ledger, tids=[keys[0].tid], drain=Batcher())


def test_records_that_were_deleted_by_hand_are_drift_once(office: Office) -> None:
    """It is told, and put right: the next run finds nothing, and the tenant has its place back."""
    deleted, kept = office.answer(quota=Quota()), office.answer(quota=Quota())
    size = office.store.ledger.usage(deleted.tid).bytes
    claimed, *_ = office.claim(quota=Quota())
    for key in (deleted, claimed):
        del office.store._shared.records[key]

    report = reconcile(office.store.ledger, drain=Batcher())
    assert (2, 1, size, 1) == (report.drifted, report.records, report.bytes, report.unsettled)
    assert ReconcileReport(tenants=3) == reconcile(office.store.ledger, drain=Batcher())
    assert (0, 1) == (office.store.ledger.usage(deleted.tid).records, office.store.ledger.usage(kept.tid).records)
