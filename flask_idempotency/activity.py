"""Count the outcomes and times of this process in memory, and add them to the store every ten seconds.

`COUNTERS` maps each event to its counters. A request only appends to a queue, which needs no lock and loses no count. A thread
folds the queue into counts and adds them to the store in one call. If the store does not answer, the thread sends the same
counts again under the same token, and later counts wait. A process that is killed loses what it has not added.
"""

from __future__ import annotations

import atexit
import logging
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from flask_idempotency.assembly import Services
from flask_idempotency.engine import activity as names
from flask_idempotency.engine import events
from flask_idempotency.engine.activity import EDGES, MOST_ENDPOINTS, OTHER_ENDPOINTS, ActivityLog, slot
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.forks import after_fork, notice
from flask_idempotency.engine.keys import LONGEST_NAME, owner_mark
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.settings import Settings

__all__ = ["Activity", "activity_of"]

FLUSH_SECONDS: Final = 10.0
"""A process that is killed loses the counts of this time at most, while the store answers."""

FOLD_AT: Final = 1000
"""Events in the queue at which a request folds them itself, so that the queue cannot fill the memory."""

TOKEN_BYTES: Final = 16

Counters: TypeAlias = Callable[[Any], tuple[str, ...]]


def _one(*counters: str) -> Counters:
    return lambda event: counters


def _failed(event: events.StoreFailed) -> tuple[str, ...]:
    if event.waiting:
        return ()  # what becomes of the request is counted when the wait ends
    return (names.UNPROTECTED if event.unprotected else names.STORE_FAILED,)


def _observed(event: events.Observation) -> tuple[str, ...]:
    counter = names.would(event.outcome, event.caller)
    if event.outcome in (names.CONFLICT, names.WAIT):
        return counter, f"{names.APART_TIME}{slot(event.apart)}"
    if event.outcome in names.ENDINGS:
        return counter, f"{names.RAN_TIME}{slot(event.seconds)}"
    return (counter,)


COUNTERS: Final[Mapping[type[Event], Counters]] = {
    events.ClaimGranted: lambda event: (names.TAKEN_OVER if event.attempt > 1 else names.NEW,),
    events.ReplayServed: _one(names.REPLAYED),
    events.ConflictRefused: _one(names.CONFLICT),
    events.MismatchRefused: _one(names.MISMATCH),
    events.UnknownRefused: _one(names.UNKNOWN),
    events.QuotaRefused: _one(names.OVER_QUOTA),
    events.ErasedRefused: _one(names.ERASED),
    events.VoidedRefused: _one(names.VOIDED),
    events.ExpiredRefused: _one(names.EXPIRED),
    events.RefusedAfterDataLoss: _one(names.DATA_LOSS),
    events.RecordCorrupt: _one(names.CORRUPT),
    events.ReplayForbidden: _one(names.FORBIDDEN),
    events.StoreFailed: _failed,
    events.Completed: lambda event: (names.COMPLETED,) if event.kept else (names.COMPLETED, names.NOT_KEPT),
    events.Released: _one(names.RELEASED),
    events.Quarantined: _one(names.QUARANTINED),
    events.Reaped: _one(names.QUARANTINED),
    events.Paused: _one(names.PAUSED),
    events.StepDoubtful: lambda event: (f"{names.IN_DOUBT}{event.step}"[: names.LONGEST_COUNTER],),
    events.Observation: _observed,
}
"""The counters that an event adds 1 to. Activity does not count the other events."""

Counted: TypeAlias = "Event | tuple[str, str] | tuple[str, str, float]"
"""An event; an endpoint and a counter; or an endpoint, the beginning of the counters of a histogram, and seconds."""

_log = logging.getLogger("flask_idempotency")

_open: WeakSet[Activity] = WeakSet()
"""What this process may have to add before it ends."""


class Activity:
    """Count for one application in this process. A forked child starts with empty counts.

    `timed` takes an endpoint, `NEW_TIME` or `REPLAYED_TIME`, and seconds. It only appends, so a request can afford it. Its
    time reaches the store with the event of its request.
    """

    def __init__(self, log: ActivityLog, *, owner: bytes, renewer: LeaseRenewer | None = None) -> None:
        """`owner` is the mark of the application. Give no `renewer` whose leases a slow call could delay."""
        self._store = log
        self._owner = owner
        self._renewer = LeaseRenewer() if renewer is None else renewer
        self._pending: deque[Counted] = deque()
        self.timed: Callable[[tuple[str, str, float]], None] = self._pending.append
        self._start_empty()
        after_fork(self._start_empty)

    def _start_empty(self) -> None:
        # The same object, because `timed` is its method.
        self._pending.clear()
        self._lock = Lock()
        self._tally: dict[tuple[str, str] | tuple[str, str, int], int] = {}
        self._endpoints: set[str] = set()
        self._counts: dict[str, dict[str, int]] = {}
        self._sending: dict[str, dict[str, int]] | None = None
        self._token = b""
        self._planned = False
        self._failed = False

    # In requests. Neither of these takes a lock, except once in `FOLD_AT` events.

    def event(self, event: Event) -> None:
        """Count this event."""
        if type(event) in COUNTERS:
            pending = self._pending
            pending.append(event)
            if not self._planned or len(pending) >= FOLD_AT:
                self._attend()

    def count(self, endpoint: str, counter: str) -> None:
        """Add 1 to this counter, for what has no event."""
        self._pending.append((endpoint, counter))
        if not self._planned or len(self._pending) >= FOLD_AT:
            self._attend()

    def _attend(self) -> None:
        if len(self._pending) >= FOLD_AT and self._lock.acquire(blocking=False):
            # If another thread holds the lock, it is folding now. So may this one, and a destructor has interrupted it.
            try:
                self._fold()
            finally:
                self._lock.release()
        if not self._planned:
            try:
                self._planned = True
                _open.add(self)
                self._renewer.add(self, after=FLUSH_SECONDS)
            except BaseException:  # such as the time limit of a task: no flush is planned, so the next event plans it
                self._planned = False
                raise

    # In the thread of the renewer.

    def run(self) -> float | None:
        """Add what was counted to the store. Return the seconds until the next time, or None if nothing was counted."""
        with self._lock:
            # Before the look into the queue: what comes after it plans the next time itself.
            self._planned = False
            self._fold()
            if not self._counts and self._sending is None:
                return None
            self._planned = True
        self.flush()
        return FLUSH_SECONDS

    def flush(self, *, quietly: bool = False) -> bool:
        """Add what was counted to the store now. Return False if the store did not take it: then it is tried again later.

        What failed is logged once until the store takes counts again; or not at all, if `quietly`.
        """
        notice()  # a child that was forked below Python may end before its first request
        with self._lock:
            self._fold()
            if self._sending is None:
                if not self._counts:
                    return True
                self._sending, self._counts = self._counts, {}
                self._token = secrets.token_bytes(TOKEN_BYTES)
            counts, token = self._sending, self._token
        try:
            self._store.add(self._owner, counts, token=token)
        except Exception as error:  # noqa: BLE001 - whatever it is, counts must not end the thread or a process
            if not self._failed and not quietly:
                _log.warning(
                    "The store did not take the counts of activity (%s). They wait in this process, which tries again every "
                    "%g s. Requests are not affected. `IDEMPOTENCY_ACTIVITY = False` switches the counts off.",
                    cause_of(error),
                    FLUSH_SECONDS,
                )
            self._failed = True
            return False
        with self._lock:
            self._failed = False
            if self._token == token:
                self._sending = None
        return True

    def _fold(self) -> None:
        """Move what is in the queue now into the counts. Call it with the lock held: nothing else takes from the queue.

        A signal handler may raise in the middle, so what was taken from the queue is in `_tally` at once.
        """
        pop, tally, edges = self._pending.popleft, self._tally, EDGES
        # No more than that: busy threads would never let this one come to an end.
        for _ in range(len(self._pending)):
            item = pop()
            if type(item) is not tuple:
                event: Any = item
                endpoint = event.operation
                for counter in COUNTERS[type(event)](event):
                    tally[endpoint, counter] = tally.get((endpoint, counter), 0) + 1
            elif len(item) == 2:
                tally[item] = tally.get(item, 0) + 1
            else:
                endpoint, histogram, seconds = item
                key = endpoint, histogram, bisect_left(edges, seconds)
                tally[key] = tally.get(key, 0) + 1
        for counted in list(tally):
            endpoint, *parts = counted
            self._add(endpoint, "".join(map(str, parts)), tally.pop(counted))

    def _add(self, endpoint: str, counter: str, number: int) -> None:
        endpoint = endpoint[:LONGEST_NAME]
        if endpoint not in self._endpoints:
            if len(self._endpoints) >= MOST_ENDPOINTS:
                endpoint = OTHER_ENDPOINTS
            else:
                self._endpoints.add(endpoint)
        counters = self._counts.setdefault(endpoint, {})
        counters[counter] = counters.get(counter, 0) + number


def activity_of(settings: Settings, built: Services, observers: Observers, *, testing: bool = False) -> Activity | None:
    """Let these observers count the activity of an application, and return what counts it. None: it is off.

    It is off in testing unless the settings switch it on: tests count calls of the store. Raises `ConfigurationError` if they
    do, and the store keeps no activity.
    """
    if settings.activity is False or (settings.activity is None and (testing or built.activity is None)):
        return None
    if built.activity is None:
        raise ConfigurationError(
            "IDEMPOTENCY_ACTIVITY is True, and this store keeps no activity. Remove the setting, or choose a store of this "
            "package."
        )
    activity = Activity(built.activity, owner=owner_mark(settings.namespace))
    observers.add(activity.event)
    return activity


def add_the_last() -> None:
    """Add what a process has counted before it ends. A store that failed before is not tried: it would delay the end."""
    for activity in list(_open):
        if not activity._failed:
            activity.flush(quietly=True)


atexit.register(add_the_last)
