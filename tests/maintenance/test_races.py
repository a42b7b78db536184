"""Whoever comes first has decided, on every store: owners, retries and janitors at the same keys at once."""

from __future__ import annotations

import os
import random

import pytest

from flask_idempotency.engine.events import Event
from flask_idempotency.engine.quota import Drift
from tests.backends import MakeStore
from tests.maintenance.races import KEYS, Jittered, Round, faults_of_lives

RACES = int(os.environ.get("RACES", "400"))
"""At each store; each is one key. 10,000 take some minutes."""
AT_A_TIME = 10
"""Rounds between two looks at how lives end: a clock that has gone 400 days ahead does not come back."""


@pytest.mark.slow
@pytest.mark.timeout(120 + RACES)
def test_no_race_loses_a_response_or_runs_a_request_twice(make_empty: MakeStore) -> None:
    clock, seed = Jittered(), random.randrange(2**32)
    store = make_empty(clock)
    left = max(RACES // KEYS, 1)
    while left > 0:
        events = list[Event]()
        rounds = [Round(store, clock, seed + 10 * number, events) for number in range(min(AT_A_TIME, left))]
        for each in rounds:
            each.run()
        assert [] == [fault for each in rounds for fault in each.wrong()]
        assert {Drift()} == {store.ledger.reconcile(each.tid) for each in rounds}  # type: ignore[attr-defined]
        assert [] == faults_of_lives(rounds, clock)
        left, seed = left - AT_A_TIME, seed + 1000
