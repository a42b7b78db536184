"""Janitors at once, beats that fire twice, runs that are delivered again: everything is done once."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.events import Event, Reaped, Resolved
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.maintenance.janitor import Task
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from tests.backends import MakeStore
from tests.maintenance.neglected import DRAIN, Neglected, janitor_of
from tests.maintenance.yard import label

JANITORS = 4


@pytest.mark.slow
@pytest.mark.parametrize("locked", (True, False), ids=("locked", "without a lock"))
def test_each_record_is_settled_once(make_empty: MakeStore, clock: FrozenClock, locked: bool) -> None:
    """
    By one of four janitors whose beats fire twice and whose runs are delivered again. Who comes late counts nothing and
    changes no ledger. The lock only saves work.
    """
    neglected = Neglected.store_of(make_empty(clock), clock)
    events = list[Event]()

    def work() -> None:
        janitor = janitor_of(neglected.store, clock, events, locked=locked)
        tasks: tuple[Task, ...] = ("reap", "reap", "expire", "expire")
        for task in tasks:
            janitor.run(task, DRAIN)

    at_once(*[work] * JANITORS)
    work()
    reaped = sorted(event.record for event in events if isinstance(event, Reaped))
    settled = sorted(event.record for event in events if isinstance(event, Resolved))

    assert sorted(map(label, neglected.lapsed)) == reaped
    assert sorted(map(label, neglected.held)) == settled
    assert [] == neglected.undone()
    assert [] == neglected.partly()
    usage = Usage(len(neglected.before), neglected.bytes, 0)
    assert (usage, Drift()) == (neglected.tenant.usage, neglected.store.ledger.reconcile(neglected.tenant.tid))
