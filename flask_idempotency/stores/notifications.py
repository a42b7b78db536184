"""The thread that listens to a server for all waiting requests of a process: shared by the stores that send notifications."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

from flask_idempotency.engine.forks import after_fork, notice
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.outages import cause_of

IDLE_SECONDS: Final = 60.0
"""The connection closes after this time without a waiter: where one request waits, others soon follow."""

PING_AFTER_SECONDS: Final = 5.0
"""After this silence the thread checks its connection, because a lost one is silent too."""

POLL_SECONDS: Final = 1.0
"""How often the thread looks whether it is still needed."""

_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 5.0

_log = logging.getLogger("flask_idempotency")


class ThreadedNotifier:
    """Implement `waiting.Notifier` with one thread and connection for all waiters of this process. The first waiter opens it.

    A server keeps no message for an absent listener. So each new connection wakes all waiters, and they read their records.
    A forked child starts without a connection.
    """

    server: ClassVar[str]
    """Its name in the log."""

    def __init__(self, *, idle_seconds: float = IDLE_SECONDS, ping_after_seconds: float = PING_AFTER_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._ping_after_seconds = ping_after_seconds
        self._start_empty()
        after_fork(self._start_empty)

    def _name(self, key: StorageKey) -> bytes:
        """Return how a message names this record."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Call `_connected` and `_wake` until `_ends_idle` with the idle time. Raise if the connection breaks or is silent."""
        raise NotImplementedError

    def _can_listen(self) -> bool:
        """Return False if waiters have to poll. A connection is then not tried."""
        return True

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._last_waiter_at = float("-inf")
        self._pause = _FIRST_PAUSE
        self.disconnected: bool = False
        self._is_closed = False

    @contextmanager
    def subscribe(self, keys: Sequence[StorageKey], wake: Callable[[], object]) -> Iterator[None]:
        notice()
        names = [self._name(key) for key in keys]
        with self._lock:
            for name in names:
                self._waiting[name] = [*self._waiting.get(name, ()), wake]
            if (self._thread is None or not self._thread.is_alive()) and self._can_listen():
                self._start()
        try:
            yield
        finally:
            with self._lock:
                for name in names:
                    waiting = self._waiting.pop(name, [])
                    if wake in waiting:
                        waiting.remove(wake)
                    if waiting:
                        self._waiting[name] = waiting
                self._last_waiter_at = time.monotonic()

    def close(self) -> None:
        """Close the connection as soon as no request waits."""
        self._last_waiter_at = float("-inf")
        self._is_closed = True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="idempotency-notifier", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _log.exception("cannot start a thread for %s notifications: waiting requests poll instead", self.server)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                self._listen()
                return
            except Exception as error:  # noqa: BLE001 - a client may raise anything, and waiting requests still poll
                if not self.disconnected and not self._is_closed:
                    _log.warning(
                        "%s notifications are interrupted (%s): waiting requests poll instead",
                        self.server,
                        cause_of(error),
                    )
                self.disconnected = True
            time.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311 - only spreads the reconnects of many workers
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            if self._ends_idle(idle_seconds=0.0):
                return

    def _ends_idle(self, *, idle_seconds: float) -> bool:
        """Return whether no request has waited for this long. Then this thread ends; the next waiter starts another."""
        with self._lock:
            idle = not self._waiting and time.monotonic() - self._last_waiter_at >= idle_seconds
            if idle:
                self._thread = None
            return idle

    def _connected(self) -> None:
        """Wake all waiters, after the connection listens: this process has received no message about earlier completions."""
        self._wake(None)
        if self.disconnected:
            _log.info("%s notifications work again", self.server)
        self.disconnected, self._pause = False, _FIRST_PAUSE

    def _wake(self, name: bytes | None) -> None:
        """Wake the waiters of the record with this name, or all of them."""
        with self._lock:
            waiting = list(self._waiting.values()) if name is None else [self._waiting.get(name, [])]
            for wake in (wake for each in waiting for wake in each):
                wake()
