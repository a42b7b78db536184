"""A janitor that is killed leaves nothing half done, and the next one finishes."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flask_idempotency.engine.events import Event
from flask_idempotency.testing import FrozenClock
from tests.maintenance.neglected import DRAIN, Neglected, janitor_of, store_at
from tests.maintenance.stores import SHARED, empty

ROOT = Path(__file__).parents[2]
KILLS = 3
LINES = 60
"""Fewer than a janitor says before it is finished here, even one that others have left nothing but their last line."""
HOUR = 3600.0


def killed_after(lines: int, url: str, now: float) -> bool:
    """Whether it was killed, and not finished before."""
    command = [sys.executable, "-m", "tests.maintenance.victim", url, repr(now)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        said = [line for _, line in zip(range(lines), victim.stdout, strict=False)]
        victim.kill()
    return "finished\n" not in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SHARED)
def test_a_killed_janitor_leaves_consistent_records(kind: str, request: pytest.FixtureRequest) -> None:
    """Wherever it was: each record is as it was or as it is to be, and the ledger right. The next run does the rest."""
    url, clock, chance = empty(kind, request), FrozenClock(), random.Random()
    with closing(store_at(url, clock)) as store:
        neglected, kills = Neglected.store_of(store, clock), 0
        for _ in range(KILLS):
            kills += killed_after(chance.randint(1, LINES), url, clock.now)
            assert [] == neglected.partly()
            clock.advance(HOUR / 8)
        events = list[Event]()
        janitor = janitor_of(store, clock, events)
        for _ in range(2):
            for task in janitor.tasks:
                assert janitor.run(task, DRAIN) is not None
            # Nobody is believed at the first question: the second comes with the record's next turn.
            clock.advance(HOUR / 8)

        assert ([], []) == (neglected.partly(), neglected.undone())
        assert kills > 0
