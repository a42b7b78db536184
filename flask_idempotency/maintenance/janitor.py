"""One application's chores: each done by one at a time, written down, and told."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from flask_idempotency.engine.capabilities import Expiry, Ledger, TaskLog, TaskReport
from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.events import Event, TaskRun

# How every chore goes through what there is to do: in batches, at a pace, and within a budget.

SMALLEST_BATCH: Final = 10
"""A store that cannot do ten in time is not slow but away."""

FAILURES: Final = 6
"""In a row, after each of which the batch is halved: 1,000 have become 31 by the last of them."""


class BatchResult(NamedTuple):
    """What one step of a chore has done."""

    touched: int
    more: bool
    """Whether there may be more to do."""


Step: TypeAlias = Callable[[int], BatchResult]
"""Does up to so many, and is over soon. It may be repeated after it has failed: what it has done is done."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """How a run through the steps of a chore went."""

    touched: int = 0
    batches: int = 0
    shrunk: int = 0
    """How often the store did not answer in time, and was asked for half as much."""
    finished: bool = True
    """False: the budget ended first. The next run goes on."""


@dataclass(frozen=True, slots=True)
class Batcher:
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

    def run(self, step: Step) -> BatchReport:
        """Repeat the step until it has nothing more to do, or the budget ends.

        When the store does not answer, the batch is halved; it grows again while the store does. Raises
        `StoreUnavailable` when not even the smallest batch is answered: what was done until then stays done.
        """
        began = self.monotonic()
        drained, limit, failures = BatchReport(), self.batch, 0
        while True:
            try:
                did = step(limit)
            except KeyProviderUnavailable:
                raise
            except StoreUnavailable:
                failures += 1
                if failures >= FAILURES or limit <= SMALLEST_BATCH:
                    raise
                limit = max(limit // 2, SMALLEST_BATCH)
                drained = BatchReport(drained.touched, drained.batches, drained.shrunk + 1)
                continue
            failures, limit = 0, min(limit + self.batch // 8 + 1, self.batch)
            drained = BatchReport(drained.touched + did.touched, drained.batches + 1, drained.shrunk)
            self.told(drained.touched)
            if not did.more:
                return drained
            self._keep_pace(drained.touched, began)
            if self.monotonic() - began >= self.budget:
                return BatchReport(drained.touched, drained.batches, drained.shrunk, finished=False)

    def _keep_pace(self, touched: int, began: float) -> None:
        if self.rate is None:
            return
        elapsed = self.monotonic() - began
        # Not beyond the budget: whoever sleeps through the end of its lock wakes up beside the next one.
        if (pause := min(touched / self.rate, self.budget) - elapsed) > 0:
            self.sleep(pause)


# Removing what nobody can see any more.


@dataclass(frozen=True, slots=True)
class ExpireReport:
    """What one run has removed."""

    removed: int = 0
    shrunk: int = 0
    finished: bool = True


def expire(expiry: Expiry, *, horizon: float, drain: Batcher) -> ExpireReport:
    """Remove what was over by this horizon (seconds since the epoch, store's clock).

    What ends meanwhile is left for the next run, so that this one ends. Never touches what is PROCESSING or QUARANTINED.
    Raises `StoreUnavailable` when the store does not answer; what was removed until then is gone.
    """

    def step(limit: int) -> BatchResult:
        removed = expiry.sweep(horizon=horizon, limit=limit)
        # Not until a batch is not full: others at the same work may have had the rest of it.
        return BatchResult(removed, more=removed > 0)

    drained = drain.run(step)
    return ExpireReport(drained.touched, drained.shrunk, drained.finished)


# Saying that the janitor is alive, and what the clocks say.


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What a janitor finds when it looks at two clocks: its own, and the store's. All in whole milliseconds."""

    skew_ms: int = 0
    """By how much the store's clock is ahead of this host's."""
    stepped_ms: int = 0
    """By how much that has changed since the last heartbeat. Whoever sets the store's clock ends lives and leases."""
    finished: bool = True


def heartbeat(last: Mapping[str, TaskReport], *, store_now: float, host_now: float) -> HeartbeatReport:
    """What is to be written down now. The last one may be another host's: then a step is what tells the two apart."""
    skew_ms = round((store_now - host_now) * 1000)
    entry = last.get("heartbeat")
    before = None if entry is None else entry.whole("skew_ms")
    return HeartbeatReport(skew_ms, stepped_ms=0 if before is None else skew_ms - before)


Chore: TypeAlias = Literal["reap", "expire", "rotate", "reconcile", "heartbeat"]
CHORES: Final[tuple[Chore, ...]] = ("reap", "expire", "rotate", "reconcile", "heartbeat")

LOCK_SECONDS: Final = 60.0
"""How long a chore may go on after its budget is spent, before somebody else takes it for dead and begins."""

_log = logging.getLogger("flask_idempotency")


class Report(Protocol):
    """What a run has done: a frozen dataclass of numbers, and whether it came to its end."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def finished(self) -> bool: ...


Work: TypeAlias = Callable[[float, Batcher], Report]
"""Does a chore, given its horizon (seconds since the epoch, store's clock) and its pace."""


class Janitor:
    """Runs the chores that its store has work for. Running one twice at once is safe: the lock only saves work."""

    def __init__(
        self,
        work: Mapping[Chore, Work],
        *,
        book: TaskLog | None,
        observers: Callable[[Event], None],
        host_clock: Callable[[], float] = time.time,
    ) -> None:
        self._work = work
        self._book = book
        self._observers = observers
        self._host_clock = host_clock

    @property
    def chores(self) -> tuple[Chore, ...]:
        """Those that there is anything to do for, in this application and its store."""
        return tuple(chore for chore in CHORES if chore in self._work)

    def run(self, chore: Chore, drain: Batcher) -> Report | None:
        """Do this chore now. None: somebody else is at it.

        It goes by the store's clock, and by this host's where that is behind: a clock that was set forward by mistake must
        not have anything removed that it ends. Raises `StoreUnavailable` when the store does not answer, and `KeyError`
        for a chore that is not among `chores`.
        """
        work = self._work[chore]
        token = secrets.token_bytes(16)
        began = drain.monotonic()
        try:
            if self._book is not None and not self._book.lock(chore, token, lease=drain.budget + LOCK_SECONDS):
                return None
            return self._done(chore, work, drain, token, began)
        except Exception as error:
            seconds = drain.monotonic() - began
            self._observers(TaskRun("", chore, seconds, counts={}, finished=False, error=type(error).__name__))
            raise

    def _done(self, chore: Chore, work: Work, drain: Batcher, token: bytes, began: float) -> Report:
        try:
            report = work(self._horizon(), drain)
            self._write_down(chore, report, seconds=drain.monotonic() - began)
        finally:
            self._give_back(chore, token)
        return report

    def _horizon(self) -> float:
        host_now = self._host_clock()
        return host_now if self._book is None else min(self._book.now(), host_now)

    def _write_down(self, chore: Chore, report: Report, *, seconds: float) -> None:
        counts = {name: count for name, count in asdict(report).items() if name != "finished"}
        if self._book is not None:
            told = {**counts, "finished": report.finished, "seconds": round(seconds, 3)}
            self._book.report(chore, json.dumps(told, separators=(",", ":")))
        self._observers(TaskRun("", chore, seconds, counts=counts, finished=report.finished))

    def _give_back(self, chore: Chore, token: bytes) -> None:
        if self._book is None:
            return
        try:
            self._book.unlock(chore, token)
        except StoreUnavailable as error:
            _log.warning("the lock of %s was not given back, and will run out (%s)", chore, type(error).__name__)


# Counting again what ledgers say.

TENANTS_AT_ONCE: Final = 20
"""Each is recounted by itself, and may have a million records."""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What the recount has found. Everything but `tenants` and `busy` is 0 unless records were changed by hand."""

    tenants: int = 0
    drifted: int = 0
    """Tenants whose ledger was wrong, and is right now."""
    records: int = 0
    bytes: int = 0
    unsettled: int = 0
    """By how much it was wrong: what was counted too much less what was counted too little, taken as it is per tenant."""
    busy: int = 0
    """Buckets that changed while they were counted, and are looked at next time."""
    shrunk: int = 0
    finished: bool = True


def reconcile(ledger: Ledger, *, drain: Batcher, tids: Iterable[bytes] | None = None) -> ReconcileReport:
    """Count the records of these tenants again, of all by default, and put their ledgers right.

    Raises `StoreUnavailable` when the store does not answer; the ledgers that were put right until then stay right.
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

    drained = drain.run(step)
    return ReconcileReport(**counts, shrunk=drained.shrunk, finished=drained.finished)
