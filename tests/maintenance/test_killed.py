"""A janitor that is killed leaves nothing half done, and the next one finishes."""

from __future__ import annotations

import random
from contextlib import closing, suppress

import pytest

from flask_idempotency.engine.events import Event
from flask_idempotency.testing import FrozenClock
from tests.forks import forks
from tests.maintenance.neglected import DRAIN, Neglected, janitor_of, store_at
from tests.maintenance.stores import SHARED, empty
from tests.maintenance.victim import look_after

KILLS = 3
LINES = 60
"""Fewer than a janitor says before it is finished here, even one that others have left nothing but their last line."""
HOUR = 3600.0


def killed_after(lines: int, url: str, now: float) -> bool:
    """Whether it was killed, and not finished before."""
    context = forks()
    ours, its = context.Pipe(duplex=False)
    victim = context.Process(target=look_after, args=(url, now, its))
    told = list[str]()
    victim.start()
    its.close()
    with ours:
        with suppress(EOFError):
            while len(told) < lines:
                told.append(ours.recv())
        victim.kill()
    victim.join()
    return "finished" not in told


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
