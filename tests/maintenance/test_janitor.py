"""The janitor runs a task once at a time, and what `expire`, `heartbeat` and `reconcile` do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import Event, TaskRun
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.quota import Drift, Quota
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.maintenance.janitor import (
    LOCK_SECONDS,
    TASKS,
    Batcher,
    ExpireReport,
    HeartbeatReport,
    Janitor,
    ReconcileReport,
    Report,
    Task,
    Work,
    expire,
    heartbeat,
    reconcile,
)
from flask_idempotency.maintenance.reap import reap
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, a_key, a_token, stand
from tests.maintenance.conftest import Office
from tests.maintenance.yard import label, still

MEETING_SECONDS = 60.0


@dataclass(frozen=True)
class Swept:
    removed: int = 0
    finished: bool = True


def works(report: Swept = Swept(7)) -> Work:
    return lambda horizon, drain: report


def fails(error: BaseException) -> Work:
    def work(horizon: float, drain: Batcher) -> Report:
        raise error

    return work


class House:
    """One store, and the janitors of several hosts."""

    def __init__(self, clock: FrozenClock) -> None:
        self.clock = clock
        self.store = MemoryStore(clock)
        self.events: list[Event] = []
        self.host_clock: Callable[[], float] = lambda: self.clock.now

    def janitor(self, work: Mapping[Task, Work] | None = None, *, book: Any = None) -> Janitor:
        return Janitor(
            work or {"expire": works()},
            task_log=book or self.store.task_log,
            observers=Observers([self.events.append]),
            host_clock=lambda: self.host_clock(),
        )

    def last(self, task: Task = "expire") -> TaskReport:
        return self.store.task_log.reports()[task]

    def is_free(self, task: Task = "expire") -> bool:
        return self.store.task_log.lock(task, a_token(), lease=1.0)


@pytest.fixture
def house(clock: FrozenClock) -> House:
    return House(clock)


def test_a_task_is_run_recorded_and_published(house: House) -> None:
    ticks = iter((10.0, 12.5))
    drain = Batcher(monotonic=ticks.__next__)

    assert Swept(7) == house.janitor().run("expire", drain)
    assert {"removed": 7, "finished": True, "seconds": 2.5} == json.loads(house.last().report)
    assert [TaskRun("", "expire", 2.5, counts={"removed": 7}, finished=True)] == house.events
    assert house.is_free()


def test_an_unfinished_task_is_reported_as_such(house: House) -> None:
    house.janitor({"expire": works(Swept(7, finished=False))}).run("expire", still())
    (event,) = house.events

    assert (False, False) == (json.loads(house.last().report)["finished"], getattr(event, "finished", None))
    assert getattr(event, "error", None) == ""


def test_a_janitor_has_only_tasks_with_work(house: House) -> None:
    """In the order in which they make sense, whoever gave them in which; others cannot be run."""
    janitor = house.janitor({"rotate": works(), "reap": works()})

    assert ("reap", "rotate") == janitor.tasks == tuple(task for task in TASKS if task in ("rotate", "reap"))
    with pytest.raises(KeyError):
        janitor.run("expire", still())


def test_a_task_that_another_janitor_runs_is_skipped(house: House) -> None:
    """While the first is at it. Another task is another's; and afterwards it is free."""
    began, may_end, reports = threading.Event(), threading.Event(), list[Any]()

    def slow(horizon: float, drain: Batcher) -> Report:
        began.set()
        assert may_end.wait(MEETING_SECONDS)
        return Swept()

    first = threading.Thread(target=lambda: reports.append(house.janitor({"expire": slow}).run("expire", still())))
    first.start()
    assert began.wait(MEETING_SECONDS)
    second = house.janitor({"expire": works(), "reap": works()})

    assert second.run("expire", still()) is None
    assert Swept(7) == second.run("reap", still())
    assert ["reap"] == [event.operation for event in house.events]
    may_end.set()
    first.join(MEETING_SECONDS)
    assert ([Swept()], Swept(7)) == (reports, second.run("expire", still()))


def test_the_lock_of_a_killed_janitor_expires_a_minute_after_its_budget(house: House, clock: FrozenClock) -> None:
    """Not for ever: then somebody else takes it for dead."""

    class Killed(BaseException):
        pass

    class Dead:
        """Nobody gives anything back who is no more."""

        def __init__(self, book: Any) -> None:
            self._book = book

        def __getattr__(self, name: str) -> Any:
            return (lambda *arguments: None) if name == "unlock" else getattr(self._book, name)

    drain = Batcher(budget=300.0)
    with pytest.raises(Killed):
        house.janitor({"expire": fails(Killed())}, book=Dead(house.store.task_log)).run("expire", drain)
    clock.advance(300 + LOCK_SECONDS - 0.125)
    assert house.janitor().run("expire", drain) is None
    clock.advance(0.125)
    assert Swept(7) == house.janitor().run("expire", drain)


@pytest.mark.parametrize("error", (StoreUnavailable("down"), ValueError("a bug"), KeyboardInterrupt()))
def test_a_failed_task_is_unlocked(house: House, error: BaseException) -> None:
    """The next run need not wait until a lock is over. Nothing was written down: it was not done."""
    with pytest.raises(type(error)):
        house.janitor({"expire": fails(error)}).run("expire", still())

    assert house.is_free()
    assert {} == house.store.task_log.reports()


def test_a_failed_task_is_published_with_the_class_of_its_error(house: House) -> None:
    """And by no more: errors may quote what nobody should read."""
    ticks = iter((10.0, 12.5))
    with pytest.raises(StoreUnavailable):
        house.janitor({"expire": fails(StoreUnavailable("secret"))}).run("expire", Batcher(monotonic=ticks.__next__))

    assert [TaskRun("", "expire", 2.5, counts={}, finished=False, error="StoreUnavailable")] == house.events


class Away:
    """A book that cannot be read or written in one place."""

    def __init__(self, book: Any, verb: str) -> None:
        self._book, self._verb = book, verb

    def __getattr__(self, name: str) -> Any:
        if name == self._verb:
            return self._fail
        return getattr(self._book, name)

    def _fail(self, *arguments: Any, **options: Any) -> Any:
        raise StoreUnavailable("down")


@pytest.mark.parametrize("verb", ("lock", "now", "report"))
def test_a_store_failure_is_published_at_every_step(house: House, verb: str) -> None:
    with pytest.raises(StoreUnavailable):
        house.janitor(book=Away(house.store.task_log, verb)).run("expire", still())

    assert ["StoreUnavailable"] == [getattr(event, "error", "") for event in house.events]
    assert house.is_free()


def test_a_task_succeeds_if_its_lock_cannot_be_removed(house: House, caplog: pytest.LogCaptureFixture) -> None:
    assert Swept(7) == house.janitor(book=Away(house.store.task_log, "unlock")).run("expire", still())
    assert "was not removed" in caplog.text
    assert not house.is_free()


def test_tasks_run_without_a_task_log(house: House) -> None:
    """By this host's clock, by as many as like: a lock only saves work."""
    horizons = list[float]()

    def work(horizon: float, drain: Batcher) -> Report:
        horizons.append(horizon)
        return Swept()

    janitor = Janitor(
        {"expire": work}, task_log=None, observers=Observers([house.events.append]), host_clock=lambda: 7.0
    )

    assert (Swept(), [7.0], 1) == (janitor.run("expire", still()), horizons, len(house.events))


@pytest.mark.parametrize(("store_ahead", "horizon"), ((0.0, 0.0), (2 * 86400.0, 0.0), (-3600.0, -3600.0)))
def test_the_horizon_is_the_earlier_of_two_clocks(house: House, store_ahead: float, horizon: float) -> None:
    """Whichever of them was set, nothing is over that the other does not call so."""
    horizons, host = list[float](), house.clock.now
    house.host_clock = lambda: host
    house.clock.advance(store_ahead)

    def work(horizon: float, drain: Batcher) -> Report:
        horizons.append(horizon)
        return Swept()

    house.janitor({"expire": work}).run("expire", still())
    assert [host + horizon] == horizons


def test_a_store_clock_in_the_future_removes_no_record(house: House, clock: FrozenClock) -> None:
    """No answer is removed and no owner declared dead; when the clock is right again, everything is as it was."""
    store, host = house.store, clock.now
    house.host_clock = lambda: host + 1
    answered, flying = a_key(), a_key()
    stand(store, clock, answered, "completed")
    stand(store, clock, flying, "in flight")
    before = [store.read(key) for key in (answered, flying)]
    janitor = house.janitor(
        {
            "expire": lambda horizon, drain: expire(store.expiry, horizon=horizon, drain=drain),
            "reap": lambda horizon, drain: reap(
                store.recovery, horizon=horizon, drain=drain, observers=house.events.append, label=label
            ),
        }
    )
    clock.advance(2 * 86400)
    for task in janitor.tasks:
        janitor.run(task, still())
    clock.advance(-2 * 86400)

    assert before == [store.read(key) for key in (answered, flying)]
    assert ["TaskRun"] * 2 == [type(event).__name__ for event in house.events]
    clock.advance(KEEP)
    house.host_clock = lambda: clock.now
    for task in janitor.tasks:
        janitor.run(task, still())
    assert {flying} == store._shared.records.keys()


# heartbeat


def before(report: str) -> dict[str, TaskReport]:
    return {"heartbeat": TaskReport(60.0, report), "reap": TaskReport(60.0, '{"skew_ms":999999}')}


def test_the_first_heartbeat_has_a_skew_and_no_step() -> None:
    assert HeartbeatReport(skew_ms=1500) == heartbeat({}, store_now=1001.5, host_now=1000.0)
    assert HeartbeatReport(skew_ms=-250) == heartbeat({}, store_now=999.75, host_now=1000.0)


def test_a_clock_jump_between_heartbeats_is_a_step() -> None:
    last = before('{"skew_ms":-250,"stepped_ms":0,"finished":true}')

    beating_s = round(last["heartbeat"].ago)
    assert HeartbeatReport(-250, 0, beating_s) == heartbeat(last, store_now=1999.75, host_now=2000.0)
    assert HeartbeatReport(172_800_000, 172_800_250, beating_s) == heartbeat(last, store_now=174800.0, host_now=2000.0)
    assert HeartbeatReport(-3_600_000, -3_599_750, beating_s) == heartbeat(last, store_now=0.0, host_now=3600.0)


def test_an_unreadable_last_heartbeat_is_no_step() -> None:
    """Nobody is to be woken because of it."""
    reports = ("", "{}", "[]", "null", "not json", '{"skew_ms":"1"}', '{"skew_ms":null}', '{"skew_ms":1.5}')
    for report in reports:
        found = heartbeat(before(report), store_now=1001.0, host_now=1000.0)
        assert (report, HeartbeatReport(skew_ms=1000, beating_s=60), True) == (report, found, found.finished)


# expire


class Shelf:
    """Something to be removed, while others add to it or take from it."""

    def __init__(self, *batches: int | Exception) -> None:
        self.batches = list(batches)
        self.asked: list[tuple[float, int]] = []

    def sweep(self, *, horizon: float, limit: int) -> int:
        self.asked.append((horizon, limit))
        batch = self.batches.pop(0) if self.batches else 0
        if isinstance(batch, Exception):
            raise batch
        return batch


def test_expire_runs_until_no_expired_record_is_left(clock: FrozenClock) -> None:
    """Not until a batch is not full: others who are at the same work may have had the rest of it."""
    shelf = Shelf(10, 3, 10, 1)

    assert ExpireReport(removed=24) == expire(shelf, horizon=7.0, drain=still(10))
    assert [(7.0, 10)] * 5 == shelf.asked


def test_expired_messages_do_not_wait_for_the_last_expired_record() -> None:
    """With more expired records than a run removes, they would stay for ever."""
    records, messages = Shelf(10, 10, 10), Shelf(4)
    drain = Batcher(10, budget=0.0)

    assert ExpireReport(removed=14, finished=False) == expire(records, messages, horizon=7.0, drain=drain)


def test_expire_asks_a_self_expiring_store_once(clock: FrozenClock) -> None:
    shelf = Shelf()

    assert ExpireReport() == expire(shelf, horizon=7.0, drain=still())
    assert len(shelf.asked) == 1


def test_expire_counts_what_it_removed_before_a_failure(clock: FrozenClock) -> None:
    shelf = Shelf(100, StoreUnavailable("slow"), 50)

    assert ExpireReport(removed=150, shrunk=1) == expire(shelf, horizon=7.0, drain=still(100))
    assert [100, 100, 50] == [limit for _, limit in shelf.asked[:3]]


# reconcile


def test_an_untouched_ledger_has_no_drift(office: Office) -> None:
    for _ in range(3):
        office.answer(quota=Quota())
    office.claim(quota=Quota())

    assert ReconcileReport(tenants=4) == reconcile(office.store.ledger, drain=Batcher())


def test_a_reconciliation_adds_up_what_each_ledger_was_wrong_by() -> None:
    """Too much in one and too little in another do not cancel out."""
    drifts = {b"a": Drift(records=2, bytes=-27, busy=1), b"b": Drift(), b"c": Drift(records=-1, unsettled=-1)}
    ledger: Any = SimpleNamespace(tenants=lambda: tuple(drifts), reconcile=drifts.__getitem__)

    assert ReconcileReport(tenants=3, drifted=2, records=3, bytes=27, unsettled=1, busy=1) == reconcile(
        ledger, drain=Batcher()
    )
