"""Where duplicates wait for the first one's answer: few seats, and none of them in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey

SLOTS_PER_KEY = 2
"""More duplicates of one key than this get their refusal at once: they would only keep others from waiting."""


class Notifier(Protocol):
    """Rings where somebody waits for a key that was settled in another process. It may miss one: nobody may rely on it."""

    def subscribe(self, keys: Sequence[StorageKey], wake: Callable[[], object]) -> AbstractContextManager[None]:
        """While inside, `wake` is called soon after one of these is settled, and whenever that may have been missed.

        From whatever thread, and more than once. Neither waits for a store nor raises what one says.
        """
        ...


class Waiters:
    """Bounds who may wait in this process, and wakes those whose key was settled.

    What was settled in this process it is told by `wake`; what was settled elsewhere, by the store's bell if it has one.

    Every waiter holds a worker thread. Unbounded, the duplicates of one slow request would leave no thread for anybody
    else, its own owner's calls back to this service included.
    """

    def __init__(self, slots: int, *, notifier: Notifier | None = None) -> None:
        self._slots = slots
        self._notifier = notifier
        self._start_empty()
        after_fork(self._start_empty)

    def _start_empty(self) -> None:
        """In a child too: the parent's threads that wait are not here to leave."""
        self._free = self._slots
        self._lock = threading.Lock()
        self._waiting: dict[StorageKey, list[threading.Event]] = {}

    @contextmanager
    def slot(self, key: StorageKey, *former: StorageKey) -> Iterator[threading.Event | None]:
        """An event that is set when the key is settled, or None when there is no seat.

        `former` is what it is called under older secrets: whoever has claimed it may know only one of them.
        """
        event = self._sit(key)
        if event is None:
            yield None
            return
        try:
            with nullcontext() if self._notifier is None else self._notifier.subscribe((key, *former), event.set):
                yield event
        finally:
            self._leave(key, event)

    def notify(self, key: StorageKey) -> None:
        """The key was settled: whoever waits for it should look."""
        if not self._waiting:
            return
        with self._lock:
            for event in self._waiting.get(key, ()):
                event.set()

    def _sit(self, key: StorageKey) -> threading.Event | None:
        with self._lock:
            seated = self._waiting.get(key, [])
            if self._free <= 0 or len(seated) >= SLOTS_PER_KEY:
                return None
            self._free -= 1
            event = threading.Event()
            self._waiting[key] = [*seated, event]
            return event

    def _leave(self, key: StorageKey, event: threading.Event) -> None:
        with self._lock:
            self._free += 1
            left = [other for other in self._waiting[key] if other is not event]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]
