"""Run the tasks of a janitor one at a time, in batches and within a budget; also expire, reconcile and heartbeat.

A task here is a plain function: it knows neither its schedule nor Celery, Flask or a command line. It may run twice at the
same time, be killed at any point, and run again. It returns a report, and raises `StoreUnavailable` if the store does not
answer.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from flask_idempotency.engine.capabilities import Expiry, Ledger
from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.events import Event, TaskRun
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.tasks import TaskLog, TaskReport, beating

Task: TypeAlias = Literal["reap", "finish", "expire", "rotate", "reconcile", "heartbeat", "relay"]
TASKS: Final[tuple[Task, ...]] = ("reap", "finish", "expire", "rotate", "reconcile", "heartbeat", "relay")

LOCK_SECONDS: Final = 60.0
"""How long a lock outlives the budget of its task. After that another janitor may run the task."""

SMALLEST_BATCH: Final = 10
"""A store that cannot do ten in time is not slow but away."""

FAILURES: Final = 6
"""Failures in a row until the run ends. Each halves the batch: 1,000 have become 31 by the last."""

_log = logging.getLogger("flask_idempotency")


class Report(Protocol):
    """The result of a task: a frozen dataclass of counts, and whether the task finished."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def finished(self) -> bool: ...


class Janitor:
    """Run the tasks that an application and its store have work for. A lock keeps two runs of a task apart, to save work."""

    def __init__(
        self,
        work: Mapping[Task, Work],
        *,
        task_log: TaskLog | None,
        observers: Callable[[Event], None],
        host_clock: Callable[[], float] = time.time,
    ) -> None:
        self._work = work
        self._task_log = task_log
        self._observers = observers
        self._host_clock = host_clock

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that have work in this application and its store."""
        return tuple(task for task in TASKS if task in self._work)

    def run(self, task: Task, drain: Batcher) -> Report | None:
        """Run this task now, and report it to the task log and the observers. Return None if another process runs it.

        The horizon is the store's time, or this host's if that is earlier: a clock that was set forward by mistake must not
        remove records. Raises `StoreUnavailable` if the store does not answer, and `KeyError` for a task that is not in
        `tasks`.
        """
        work, task_log = self._work[task], self._task_log
        token = secrets.token_bytes(16)
        began = drain.monotonic()
        try:
            if task_log is not None and not task_log.lock(task, token, lease=drain.budget + LOCK_SECONDS):
                return None
            try:
                host_now = self._host_clock()
                report = work(host_now if task_log is None else min(task_log.now(), host_now), drain)
                seconds = drain.monotonic() - began
                # A field that is not compared is no count.
                every = [each.name for each in fields(report) if each.compare and each.name != "finished"]
                counts = {name: getattr(report, name) for name in every}
                if task_log is not None:
                    entry = {**counts, "finished": report.finished, "seconds": round(seconds, 3)}
                    task_log.report(task, json.dumps(entry, separators=(",", ":")))
                self._observers(TaskRun("", task, seconds, counts=counts, finished=report.finished))
            finally:
                self._unlock(task, token)
        except Exception as error:
            seconds = drain.monotonic() - began
            self._observers(TaskRun("", task, seconds, counts={}, finished=False, error=cause_of(error)))
            raise
        return report

    def _unlock(self, task: Task, token: bytes) -> None:
        if self._task_log is None:
            return
        try:
            self._task_log.unlock(task, token)
        except StoreUnavailable as error:
            _log.warning("The lock of task %s was not removed and will expire (%s).", task, cause_of(error))


class BatchResult(NamedTuple):
    """What one step of a task did."""

    touched: int
    more: bool
    """Whether there may be more work."""


Step: TypeAlias = Callable[[int], BatchResult]
"""Handle up to this many, quickly. A step that failed may run again: what it did stays done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """How a run through the steps of a task ended."""

    shrunk: int = 0
    """How often the store did not answer in time, and the batch was halved."""
    finished: bool = True
    """False: the budget ended first. The next run continues, or finds fewer."""


@dataclass(frozen=True, slots=True)
class BatchReport(RunReport):
    """The result of a run through the steps of a task."""

    touched: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Batcher:
    """The pace of a task. Times are seconds."""

    batch: int = 1000
    """Records in one step: tens of milliseconds of the store's time, so that no request notices."""
    budget: float = 300.0
    """The run ends after this, finished or not, before the next run starts."""
    rate: float | None = None
    """The most records per second over the whole run. None: as fast as the store answers."""
    sleep: Callable[[float], object] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    on_progress: Callable[[int], object] = lambda touched: None
    """Called after every batch with the number touched so far."""

    def run(self, step: Step) -> BatchReport:
        """Repeat the step until it has no more work, or the budget ends.

        If the store does not answer, halve the batch; grow it again while the store answers. Raises `StoreUnavailable` if
        even the smallest batch gets no answer: what was done until then stays done.
        """
        began = self.monotonic()
        touched, batches, shrunk, limit, failures = 0, 0, 0, self.batch, 0
        while True:
            try:
                result = step(limit)
            except KeyProviderUnavailable:
                raise
            except StoreUnavailable:
                failures += 1
                if failures >= FAILURES or limit <= SMALLEST_BATCH:
                    raise
                limit = max(limit // 2, SMALLEST_BATCH)
                shrunk += 1
                continue
            failures, limit = 0, min(limit + self.batch // 8 + 1, self.batch)
            touched, batches = touched + result.touched, batches + 1
            self.on_progress(touched)
            if not result.more:
                return BatchReport(touched, batches, shrunk=shrunk)
            if self.rate is not None:
                # Never past the budget: a run that sleeps past the end of its lock wakes up beside the next run.
                pause = min(touched / self.rate, self.budget) - (self.monotonic() - began)
                if pause > 0:
                    self.sleep(pause)
            if self.monotonic() - began >= self.budget:
                return BatchReport(touched, batches, shrunk=shrunk, finished=False)

    def rest(self, first: BatchReport, *, began: float) -> Batcher:
        """Return the pace of the next pass of a run that began then: with what is left of the budget, and the same count."""
        return replace(
            self,
            budget=self.budget - (self.monotonic() - began),
            on_progress=lambda touched: self.on_progress(first.touched + touched),
        )


Work: TypeAlias = Callable[[float, Batcher], Report]
"""Run a task, up to this horizon (seconds since the epoch, store's clock) and at this pace."""


@dataclass(frozen=True, slots=True)
class ExpireReport(RunReport):
    """The result of one run of `expire`."""

    removed: int = 0
    journals: int = 0
    """Journals of steps whose record is gone, is completed, or is in another life."""


def sweep_journals(journals: Journals, *, drain: Batcher) -> BatchReport:
    """Remove journals that no record needs. Its `touched` is how many; `Journals.sweep` says which.

    Raises `StoreUnavailable` if the store does not answer; what was removed until then is gone.
    """
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        swept = journals.sweep(after=cursor or b"", limit=limit)
        cursor = swept.after
        return BatchResult(swept.removed, more=cursor is not None)

    return drain.run(step)


def expire(expiry: Expiry, *, horizon: float, drain: Batcher, journals: Journals | None = None) -> ExpireReport:
    """Remove the records that expired by this horizon (seconds since the epoch, store's clock).

    Leave records that expire during the run to the next one, so that this run ends. Never touch a PROCESSING or QUARANTINED
    record. Then remove the journals of steps that no record needs. Raises `StoreUnavailable` if the store does not answer;
    what was removed until then is gone.
    """

    def step(limit: int) -> BatchResult:
        removed = expiry.sweep(horizon=horizon, limit=limit)
        # Go on after a batch that is not full: another janitor may have had the rest of it.
        return BatchResult(removed, more=removed > 0)

    began = drain.monotonic()
    report = drain.run(step)
    if journals is None or not report.finished:
        return ExpireReport(report.touched, shrunk=report.shrunk, finished=report.finished)
    swept = sweep_journals(journals, drain=drain.rest(report, began=began))
    shrunk = report.shrunk + swept.shrunk
    return ExpireReport(report.touched, swept.touched, shrunk=shrunk, finished=swept.finished)


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """The store's clock compared with this host's, in whole milliseconds."""

    skew_ms: int = 0
    """How far the store's clock is ahead of this host's."""
    stepped_ms: int = 0
    """How much that changed since the last heartbeat. A store's clock that jumps ends lives and leases."""
    beating_s: int = 0
    """Whole seconds since the first heartbeat: a daily task that never ran may still be due."""
    finished: bool = True


def heartbeat(last: Mapping[str, TaskReport], *, store_now: float, host_now: float) -> HeartbeatReport:
    """Compare the clocks. If the last heartbeat came from another host, the step is the difference between the hosts."""
    skew_ms = round((store_now - host_now) * 1000)
    entry = last.get("heartbeat")
    before = None if entry is None else entry.whole("skew_ms")
    return HeartbeatReport(skew_ms, 0 if before is None else skew_ms - before, round(beating(last) or 0.0))


TENANTS_AT_ONCE: Final = 20
"""One step recounts at most this many tenants: each may have a million records."""


@dataclass(frozen=True, slots=True)
class ReconcileReport(RunReport):
    """The result of a recount. All but `tenants` and `busy` is 0 unless an operator changed records by hand."""

    tenants: int = 0
    drifted: int = 0
    """Tenants with a wrong ledger, which is correct now."""
    records: int = 0
    bytes: int = 0
    unsettled: int = 0
    """The sum of the errors, each without its sign: per tenant, what was counted too much less what was counted too little."""
    busy: int = 0
    """Buckets that changed during their count. The next run counts them."""


def reconcile(ledger: Ledger, *, drain: Batcher, tids: Iterable[bytes] | None = None) -> ReconcileReport:
    """Recount the records of these tenants, by default of all, and correct their ledgers.

    Raises `StoreUnavailable` if the store does not answer; the ledgers that were corrected until then stay correct.
    """
    left = list(ledger.tenants() if tids is None else tids)
    counts: Counter[str] = Counter()

    def step(limit: int) -> BatchResult:
        batch = left[-min(limit, TENANTS_AT_ONCE) :]
        for tid in batch:
            drift = ledger.reconcile(tid)
            left.remove(tid)
            counts.update(tenants=1, drifted=int(not drift.none), busy=drift.busy)
            counts.update(records=abs(drift.records), bytes=abs(drift.bytes), unsettled=abs(drift.unsettled))
        return BatchResult(len(batch), more=bool(left))

    report = drain.run(step)
    return ReconcileReport(**counts, shrunk=report.shrunk, finished=report.finished)
