"""How every chore goes through what there is to do: in batches, at a pace, and within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from flask_idempotency.engine.errors import KeysUnavailable, StoreUnavailable

SMALLEST_BATCH: Final = 10
"""A store that cannot do ten in time is not slow but away."""

FAILURES: Final = 6
"""In a row, after each of which the batch is halved: 1,000 have become 31 by the last of them."""


class Did(NamedTuple):
    """What one step of a chore has done."""

    touched: int
    more: bool
    """Whether there may be more to do."""


Step: TypeAlias = Callable[[int], Did]
"""Does up to so many, and is over soon. It may be repeated after it has failed: what it has done is done."""


@dataclass(frozen=True, slots=True)
class Drained:
    """How a run through the steps of a chore went."""

    touched: int = 0
    batches: int = 0
    shrunk: int = 0
    """How often the store did not answer in time, and was asked for half as much."""
    finished: bool = True
    """False: the budget ended first. The next run goes on."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The pace of chores. Times are seconds."""

    batch: int = 1000
    """As many at once as nobody else notices: tens of milliseconds of the store's time."""
    budget: float = 300.0
    """After this the run ends, finished or not: the next one must not find it still at work."""
    rate: float | None = None
    """No more than so many per second, over the whole run. None: as fast as the store answers."""
    sleep: Callable[[float], object] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    told: Callable[[int], object] = lambda touched: None
    """Hears after every batch how many were touched so far."""

    def run(self, step: Step) -> Drained:
        """Repeat the step until it has nothing more to do, or the budget ends.

        When the store does not answer, the batch is halved; it grows again while the store does. Raises
        `StoreUnavailable` when not even the smallest batch is answered: what was done until then stays done.
        """
        began = self.monotonic()
        drained, limit, failures = Drained(), self.batch, 0
        while True:
            try:
                did = step(limit)
            except KeysUnavailable:
                raise
            except StoreUnavailable:
                failures += 1
                if failures >= FAILURES or limit <= SMALLEST_BATCH:
                    raise
                limit = max(limit // 2, SMALLEST_BATCH)
                drained = Drained(drained.touched, drained.batches, drained.shrunk + 1)
                continue
            failures, limit = 0, min(limit + self.batch // 8 + 1, self.batch)
            drained = Drained(drained.touched + did.touched, drained.batches + 1, drained.shrunk)
            self.told(drained.touched)
            if not did.more:
                return drained
            self._keep_pace(drained.touched, began)
            if self.monotonic() - began >= self.budget:
                return Drained(drained.touched, drained.batches, drained.shrunk, finished=False)

    def _keep_pace(self, touched: int, began: float) -> None:
        if self.rate is None:
            return
        elapsed = self.monotonic() - began
        # Not beyond the budget: whoever sleeps through the end of its lock wakes up beside the next one.
        if (pause := min(touched / self.rate, self.budget) - elapsed) > 0:
            self.sleep(pause)
