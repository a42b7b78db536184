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
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from flask_idempotency.engine.capabilities import Expiry, Ledger
from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.events import Event, TaskRun
from flask_idempotency.engine.journal import Journals, SweptJournals
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


@dataclass(frozen=True, slots=True)
class Janitor:
    """Run the tasks that an application and its store have work for. A lock keeps two runs of a task apart, to save work."""

    work: Mapping[Task, Work]
    _: KW_ONLY
    task_log: TaskLog | None
    observers: Callable[[Event], None]
    host_clock: Callable[[], float] = time.time

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that have work in this application and its store."""
        return tuple(task for task in TASKS if task in self.work)

    def run(self, task: Task, drain: Batcher) -> Report | None:
        """Run this task now, and report it to the task log and the observers. Return None if another process runs it.

        The horizon is the store's time, or this host's if that is earlier: a clock that was set forward by mistake must not
        remove records. Raises `StoreUnavailable` if the store does not answer, and `KeyError` for a task that is not in
        `tasks`.
        """
        work, task_log = self.work[task], self.task_log
        token = secrets.token_bytes(16)
        began = drain.monotonic()
        try:
            if task_log is not None and not task_log.lock(task, token, lease=drain.budget + LOCK_SECONDS):
                return None
            try:
                host_now = self.host_clock()
                report = work(host_now if task_log is None else min(task_log.now(), host_now), drain)
                seconds = drain.monotonic() - began
                # A field that is not compared is no count.
                every = [each.name for each in fields(report) if each.compare and each.name != "finished"]
                counts = {name: getattr(report, name) for name in every}
                if task_log is not None:
                    entry = {**counts, "finished": report.finished, "seconds": round(seconds, 3)}
                    task_log.report(task, json.dumps(entry, separators=(",", ":")))
                self.observers(TaskRun("", task, seconds, counts=counts, finished=report.finished))
            finally:
                if task_log is not None:
                    try:
                        task_log.unlock(task, token)
                    except StoreUnavailable as error:
                        _log.warning("The lock of task %s was not removed and will expire (%s).", task, cause_of(error))
        except Exception as error:
            seconds = drain.monotonic() - began
            self.observers(TaskRun("", task, seconds, counts={}, finished=False, error=cause_of(error)))
            raise
        return report


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

    def run(self, *steps: Step, each: bool = False) -> RunReport:
        """Repeat each step until it has no more work, one step after the other, or until the budget of all ends.

        `each`: a step that takes the whole budget leaves one batch to each step behind it. If the store does not answer, halve
        the batch; grow it again while the store answers. Raises `StoreUnavailable` if even the smallest batch gets no answer:
        what was done until then stays done.
        """
        began = self.monotonic()
        touched, shrunk, finished = 0, 0, True
        for step in steps:
            if not (finished or each):
                break
            limit, failures = self.batch, 0
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
                touched += result.touched
                self.on_progress(touched)
                if not result.more:
                    break
                if self.rate is not None:
                    # Never past the budget: a run that sleeps past the end of its lock wakes up beside the next run.
                    pause = min(touched / self.rate, self.budget) - (self.monotonic() - began)
                    if pause > 0:
                        self.sleep(pause)
                if self.monotonic() - began >= self.budget:
                    finished = False
                    break
        return RunReport(shrunk=shrunk, finished=finished)


def pages(read: Callable[..., Any], handle: Callable[[Any], int]) -> Step:
    """Return the step that handles all that `read` returns, one page in each run of it.

    `read` takes `after` and `limit`; its page says in `after` where the next one begins. `handle` returns how many it touched.
    """
    cursor = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = read(after=cursor, limit=limit)
        touched = handle(page)
        cursor = page.after or b""
        return BatchResult(touched, more=page.after is not None)

    return step


Work: TypeAlias = Callable[[float, Batcher], Report]
"""Run a task, up to this horizon (seconds since the epoch, store's clock) and at this pace."""


@dataclass(frozen=True, slots=True)
class ExpireReport(RunReport):
    """The result of one run of `expire`."""

    removed: int = 0
    journals: int = 0
    """Journals of steps whose record is gone, is completed, or is in another life."""


def expire(*expiries: Expiry, horizon: float, drain: Batcher, journals: Journals | None = None) -> ExpireReport:
    """Remove the records and messages that expired by this horizon (seconds since the epoch, store's clock).

    Each batch removes some of both: messages do not wait for the last of many records. Leave those that expire during the run
    to the next one, so that this run ends. Never touch a PROCESSING or QUARANTINED record. Then remove the journals of steps
    that no record needs. Raises `StoreUnavailable` if the store does not answer; what was removed until then is gone.
    """

    counts: Counter[str] = Counter()

    def sweep(limit: int) -> BatchResult:
        removed = sum(expiry.sweep(horizon=horizon, limit=limit) for expiry in expiries)
        counts["removed"] += removed
        # Go on after a batch that is not full: another janitor may have had the rest of it.
        return BatchResult(removed, more=removed > 0)

    def swept(page: SweptJournals) -> int:
        counts["journals"] += page.removed
        return page.removed

    ended = drain.run(sweep, *([] if journals is None else [pages(journals.sweep, swept)]))
    return ExpireReport(**counts, shrunk=ended.shrunk, finished=ended.finished)


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


def reconcile(ledger: Ledger, *, drain: Batcher) -> ReconcileReport:
    """Recount the records of all tenants, and correct their ledgers.

    Raises `StoreUnavailable` if the store does not answer; the ledgers that were corrected until then stay correct.
    """
    left = list(ledger.tenants())
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
