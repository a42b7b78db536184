"""In this process, one thread at a time for each tenant: the others wait here, and hold no connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """Remembers only tenants that somebody is waiting for."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """In a child: whoever was in here is not here to leave."""
        self._lock = threading.Lock()
        self._crowds: dict[bytes, _Crowd] = {}

    @contextmanager
    def turn(self, tid: bytes, *, patience: float) -> Iterator[bool]:
        """Nobody else has this tenant's until it is left. False: it was not free for so many seconds."""
        with self._lock:
            crowd = self._crowds.setdefault(tid, _Crowd())
            crowd.size += 1
        try:
            mine = crowd.turn.acquire(timeout=patience)
            try:
                yield mine
            finally:
                if mine:
                    crowd.turn.release()
        finally:
            with self._lock:
                crowd.size -= 1
                if crowd.size == 0 and self._crowds.get(tid) is crowd:
                    del self._crowds[tid]

    def __len__(self) -> int:
        return len(self._crowds)


class _Crowd:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.size = 0
