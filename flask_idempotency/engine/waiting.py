"""Let duplicates of a running request wait for its response, a few in each process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey

SLOTS_PER_KEY = 2
"""Most duplicates of one key that wait. Further ones are refused immediately, to leave slots for other keys."""

FIRST_POLL_SECONDS = 0.02
LAST_POLL_SECONDS = 0.5
"""A waiter looks after 20 ms, then ever more rarely: an early herd of pollers costs more than a late response."""


def next_poll(seconds: float) -> float:
    """Return the pause after one of this length."""
    return min(seconds * random.uniform(1.3, 1.7), LAST_POLL_SECONDS)  # noqa: S311 - spreads a herd, hides nothing


class Notifier(Protocol):
    """Wakes waiters of keys whose claim ended in another process. It may miss one, so waiters must also poll."""

    def subscribe(self, keys: Sequence[StorageKey], wake: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `wake` soon after a claim on one of these keys ends, and whenever that may have been missed.

        It may call from any thread and more than once. It never waits for a store, and never raises a store's error.
        """
        ...


class Waiters:
    """Limits how many requests wait in this process, and wakes them when their claim ends.

    `notify` reports claims that end in this process. The store's notifier, if it has one, reports all others.

    Every waiter holds a worker thread. Without a limit, the duplicates of one slow request would take all threads, also
    those for calls that its own view makes back to this service.
    """

    def __init__(self, slots: int, *, notifier: Notifier | None = None) -> None:
        self._slots = slots
        self._notifier = notifier
        self._start_empty()
        after_fork(self._start_empty)

    def _start_empty(self) -> None:
        """Start without waiters, also in a forked child, which has none of its parent's threads."""
        self._free = self._slots
        self._lock = threading.Lock()
        self.waiting: dict[StorageKey, list[threading.Event]] = {}
        """Who waits for each key. Most claims end with nothing in it, and then need not call `notify`."""
        self._status: set[threading.Event] = set()

    @contextmanager
    def slot(self, key: StorageKey, *former: StorageKey, status: bool = False) -> Iterator[threading.Event | None]:
        """Wait for this key: yield an event that is set when its claim ends, or None if no slot is free.

        `former` are its storage keys under older secrets: the worker that holds the claim may know only one of them.
        `status`: a client only asks for the status of the key. Such waits get at most half of the slots of the process, and
        half of those of a key, so that they never keep a duplicate from waiting for its response.
        """
        event = threading.Event()
        with self._lock:
            waiting = self.waiting.get(key, [])
            free = self._free > 0 and len(waiting) < SLOTS_PER_KEY
            if status and free:
                asking = self._status.intersection(waiting)
                free = len(self._status) < self._slots // 2 and len(asking) < SLOTS_PER_KEY // 2
            if free:
                self._free -= 1
                self.waiting[key] = [*waiting, event]
                if status:
                    self._status.add(event)
        if not free:
            yield None
            return
        try:
            with nullcontext() if self._notifier is None else self._notifier.subscribe((key, *former), event.set):
                yield event
        finally:
            with self._lock:
                self._free += 1
                self._status.discard(event)
                self.waiting[key].remove(event)
                if not self.waiting[key]:
                    del self.waiting[key]

    def notify(self, key: StorageKey) -> None:
        """Wake the requests that wait for this key: its claim has ended."""
        with self._lock:
            for event in self.waiting.get(key, ()):
                event.set()
