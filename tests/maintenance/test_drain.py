"""The pace of a task: in batches that a store can answer, no faster than it may, and no longer than it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.maintenance.janitor import FAILURES, SMALLEST_BATCH, Batcher, BatchResult, RunReport


class Hours:
    """A clock that passes when somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


class Pile:
    """So many things to do, each of which takes a while."""

    def __init__(
        self, hours: Hours, size: int, *, takes: float = 0.0, fails: Callable[[int], bool] | None = None
    ) -> None:
        self.hours, self.left, self.takes = hours, size, takes
        self.fails = fails or (lambda call: False)
        self.limits: list[int] = []

    def step(self, limit: int) -> BatchResult:
        self.limits.append(limit)
        if self.fails(len(self.limits)):
            raise StoreUnavailable("down")
        did = min(limit, self.left)
        self.left -= did
        self.hours.now += did * self.takes
        return BatchResult(did, more=self.left > 0)


@pytest.fixture
def hours() -> Hours:
    return Hours()


def drain(hours: Hours, **pace: object) -> Batcher:
    return Batcher(sleep=hours.sleep, monotonic=hours, **pace)  # type: ignore[arg-type]


def test_work_is_done_in_batches(hours: Hours) -> None:
    pile, told = Pile(hours, 250), list[int]()
    drained = drain(hours, batch=100, on_progress=told.append).run(pile.step)

    assert RunReport() == drained
    assert ([100, 100, 100], [100, 200, 250], []) == (pile.limits, told, hours.slept)


def test_a_run_without_work_is_one_step(hours: Hours) -> None:
    assert RunReport() == drain(hours).run(Pile(hours, 0).step)


def test_a_run_ends_with_its_budget(hours: Hours) -> None:
    pile = Pile(hours, 1000, takes=0.1)
    drained = drain(hours, batch=100, budget=25.0).run(pile.step)

    assert RunReport(finished=False) == drained
    assert pile.left == 700


def test_steps_share_the_budget_and_the_count_of_a_run(hours: Hours) -> None:
    first, second, third = Pile(hours, 250, takes=0.1), Pile(hours, 150, takes=0.1), Pile(hours, 10)
    told = list[int]()
    drained = drain(hours, batch=100, budget=30.0, on_progress=told.append).run(first.step, second.step, third.step)

    assert RunReport(finished=False) == drained
    assert ([100, 200, 250, 350], (0, 50, 10)) == (told, (first.left, second.left, third.left))


def test_a_run_may_leave_one_batch_to_each_step_after_its_budget(hours: Hours) -> None:
    first, second = Pile(hours, 1000, takes=0.1), Pile(hours, 250)
    drained = drain(hours, batch=100, budget=30.0).run(first.step, second.step, each=True)

    assert (RunReport(finished=False), 700, 150) == (drained, first.left, second.left)


def test_a_run_that_finishes_as_its_budget_ends_is_finished(hours: Hours) -> None:
    assert drain(hours, batch=100, budget=5.0).run(Pile(hours, 100, takes=0.1).step).finished


def test_the_rate_holds_over_the_whole_run(hours: Hours) -> None:
    """A batch that took long needs no pause, and one that was quick a longer one."""
    pile = Pile(hours, 400, takes=0.001)
    drain(hours, batch=100, rate=50.0).run(pile.step)

    assert hours.slept == pytest.approx([1.9, 1.9, 1.9])
    slow = Hours()
    drain(slow, batch=100, rate=50.0).run(Pile(slow, 400, takes=0.1).step)
    assert slow.slept == []


def test_a_run_does_not_sleep_past_its_budget(hours: Hours) -> None:
    """Its lock would be over when it wakes up, and somebody else at work."""
    drained = drain(hours, batch=1000, rate=1.0, budget=60.0).run(Pile(hours, 5000).step)

    assert (60.0, RunReport(finished=False)) == (hours.now, drained)


def test_a_batch_that_times_out_is_halved(hours: Hours) -> None:
    """And it grows again, to what it was and no further, while the store answers."""
    pile = Pile(hours, 5000, fails=lambda call: call <= 2)
    drained = drain(hours, batch=1000).run(pile.step)

    assert (0, 2, True) == (pile.left, drained.shrunk, drained.finished)
    assert [1000, 500, 250, 376, 502, 628, 754, 880, 1000, 1000] == pile.limits[:10]


def test_a_run_ends_if_the_store_stays_silent(hours: Hours) -> None:
    pile = Pile(hours, 5000, fails=lambda call: True)
    with pytest.raises(StoreUnavailable):
        drain(hours, batch=1000).run(pile.step)

    assert [1000, 500, 250, 125, 62, 31] == pile.limits
    assert len(pile.limits) == FAILURES


def test_a_run_ends_if_the_smallest_batch_fails(hours: Hours) -> None:
    pile = Pile(hours, 5000, fails=lambda call: True)
    with pytest.raises(StoreUnavailable):
        drain(hours, batch=25).run(pile.step)

    assert [25, 12, SMALLEST_BATCH] == pile.limits


def test_only_failures_in_a_row_end_a_run(hours: Hours) -> None:
    pile = Pile(hours, 4000, fails=lambda call: call % 2 == 1)
    drained = drain(hours, batch=1000).run(pile.step)

    assert (0, True) == (pile.left, drained.finished)
    assert drained.shrunk > FAILURES


def test_progress_is_reported_once_despite_a_failure(hours: Hours) -> None:
    pile, told = Pile(hours, 300, fails=lambda call: call == 2), list[int]()
    drain(hours, batch=100, on_progress=told.append).run(pile.step)

    assert (300, told) == (told[-1], sorted(told))


def test_an_unavailable_key_provider_is_not_retried(hours: Hours) -> None:
    """To ask again with half as many would change nothing."""
    calls = list[int]()

    def step(limit: int) -> BatchResult:
        calls.append(limit)
        raise KeyProviderUnavailable("the key service is away")

    with pytest.raises(KeyProviderUnavailable):
        drain(hours).run(step)
    assert calls == [1000]
