"""Where duplicates wait for the first one's answer: few seats, and none of them in a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flask_idempotency.engine.key import StorageKey

SEATS_PER_KEY = 2
"""More duplicates of one key than this get their refusal at once: they would only keep others from waiting."""


class WaitingRoom:
    """Bounds who may wait in this process, and wakes those whose key was settled in it.

    Every waiter holds a worker thread. Unbounded, the duplicates of one slow request would leave no thread for anybody
    else, its own owner's calls back to this service included.
    """

    def __init__(self, seats: int) -> None:
        self._free = seats
        self._lock = threading.Lock()
        self._seated: dict[StorageKey, list[threading.Event]] = {}

    @contextmanager
    def seat(self, key: StorageKey) -> Iterator[threading.Event | None]:
        """An event that is set when the key is settled here, or None when there is no seat."""
        event = self._sit(key)
        try:
            yield event
        finally:
            if event is not None:
                self._leave(key, event)

    def wake(self, key: StorageKey) -> None:
        """The key was settled: whoever waits for it should look."""
        if not self._seated:
            return
        with self._lock:
            for event in self._seated.get(key, ()):
                event.set()

    def _sit(self, key: StorageKey) -> threading.Event | None:
        with self._lock:
            seated = self._seated.get(key, [])
            if self._free <= 0 or len(seated) >= SEATS_PER_KEY:
                return None
            self._free -= 1
            event = threading.Event()
            self._seated[key] = [*seated, event]
            return event

    def _leave(self, key: StorageKey, event: threading.Event) -> None:
        with self._lock:
            self._free += 1
            left = [other for other in self._seated[key] if other is not event]
            if left:
                self._seated[key] = left
            else:
                del self._seated[key]
