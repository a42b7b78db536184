"""Renew the leases of running claims in one thread per process, and repeat failed writes."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from flask_idempotency.engine import forks
from flask_idempotency.engine.errors import StoreUnavailable

RETRY_SECONDS = 0.5
"""Pause before the next try after no answer: short against a lease, long for a server that is starting."""

FAILED_SECONDS = 5.0
"""Pause after any other failure: such failures seldom pass by themselves."""

LOOK_SECONDS = 0.05
"""How often `drain` looks whether something is left."""

DROPPABLE_LIMIT = 1024
"""Most *droppable* claims in memory. Later ones are dropped, so that a long outage cannot fill the memory."""

THREAD_NAME = "idempotency-lease"

_log = logging.getLogger("flask_idempotency")


class Renewable(Protocol):
    """A claim whose lease must be renewed, or whose last write must be repeated."""

    def run(self) -> float | None:
        """Renew or repeat now. Return the seconds until the next time, or None if there is none.

        Raises `StoreUnavailable` to run again soon.
        """
        ...


class LeaseRenewer:
    """Runs due renewables in a background thread. A forked child starts empty: it does not hold its parent's claims."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, threaded: bool = True) -> None:
        self._monotonic = monotonic
        self._threaded = threaded
        self._start_empty()
        forks.after_fork(self._start_empty)

    def _start_empty(self) -> None:
        self._due: dict[Renewable, float] = {}
        self._unanswered: weakref.WeakSet[Renewable] = weakref.WeakSet()
        self._droppable: weakref.WeakSet[Renewable] = weakref.WeakSet()
        # The lock of the condition, which takes two more calls. Reentrant, because a destructor may end a claim.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._planned = float("inf")
        self._not_before = float("-inf")

    def add(self, renewable: Renewable, *, after: float, droppable: bool = False) -> None:
        """Run this `after` seconds from now, and then as often as it returns. `droppable`: only if there is room."""
        if os.getpid() != forks.pid:
            forks.notice()
        with self._lock:
            if droppable:
                if len(self._droppable) >= DROPPABLE_LIMIT:
                    return
                self._droppable.add(renewable)
            due = self._monotonic() + after
            self._due[renewable] = due
            if self._threaded and (self._thread is None or not self._thread.is_alive()):
                self._start()
            elif due < self._planned:
                self._changed.notify()

    def remove(self, renewable: Renewable) -> None:
        """Stop running this one. Harmless if it is not here."""
        with self._lock:
            self._due.pop(renewable, None)

    def drain(self, timeout: float) -> int:
        """Run everything at once, then as usual until nothing is left. Return how many are left after `timeout` seconds.

        Call it before a process ends: the writes that the store has not taken yet would end with it.
        """
        end = self._monotonic() + timeout
        with self._changed:
            self._due = dict.fromkeys(self._due, self._monotonic())
            self._not_before = float("-inf")
            self._changed.notify_all()
        while True:
            if self._thread is None or not self._thread.is_alive():
                self.tick()
            with self._changed:
                left = len(self._due)
                seconds = end - self._monotonic()
                if not left or seconds <= 0:
                    return left
                self._changed.wait(min(seconds, LOOK_SECONDS))

    def tick(self) -> None:
        """Run everything that is due. What got no answer from its store the last time comes last.

        One more failure among those ends the round. So a silent part of a store does not delay the claims in other parts.
        Any other exception is logged, and the renewable runs again later; it does not affect the others.
        """
        now = self._monotonic()
        with self._changed:
            due_now = [(renewable, due) for renewable, due in self._due.items() if due <= now]
        for renewable, due in sorted(due_now, key=lambda pair: (pair[0] in self._unanswered, pair[1])):
            after: float | None = FAILED_SECONDS
            try:
                after = renewable.run()
            except StoreUnavailable:
                self._put_back(renewable, due, RETRY_SECONDS)
                self._not_before = self._monotonic() + RETRY_SECONDS
                if renewable in self._unanswered:
                    break
                self._unanswered.add(renewable)
                continue
            except Exception:  # noqa: BLE001 - a store may raise anything, and this thread serves them all
                _log.exception("a claim could not be renewed or ended; it is tried again")
            self._unanswered.discard(renewable)
            self._put_back(renewable, due, after)

    def _put_back(self, renewable: Renewable, due: float, after: float | None) -> None:
        with self._changed:
            if self._due.get(renewable) != due:
                return  # removed while it ran, or added again for another write
            if after is None:
                del self._due[renewable]
                self._droppable.discard(renewable)
            else:
                self._due[renewable] = self._monotonic() + after

    def _start(self) -> None:
        arguments = weakref.ref(self), self._changed
        thread = threading.Thread(target=_run, args=arguments, name=THREAD_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The claim is granted and its view must run. The next claim starts the thread; until then leases expire.
            _log.exception("no thread can be started: leases are not renewed")
        else:
            self._thread = thread

    def _pause(self) -> float:
        """Return the seconds until something is due. Call it with the condition held."""
        self._planned = max(min(self._due.values(), default=float("inf")), self._not_before)
        return min(max(self._planned - self._monotonic(), 0.0), 60.0)


def _run(weak: weakref.ref[LeaseRenewer], changed: threading.Condition) -> None:
    """Run what is due, for ever. Holds the renewer only then, so that the thread ends with its application."""
    while True:
        with changed:
            if (renewer := weak()) is None:
                return
            pause = renewer._pause()
            del renewer
            changed.wait(pause)
        if (renewer := weak()) is None:
            return
        renewer.tick()
        del renewer
