"""One pub/sub subscription per process, which wakes waiting requests when another process settles their key."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from flask_idempotency.engine.forks import after_fork, notice
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.redis import layout

IDLE_SECONDS: Final = 60.0
"""The subscription closes after this time without a waiter: where one request waits, others soon follow."""

PING_AFTER_SECONDS: Final = 5.0
"""After this silence the thread sends a PING. After as long again it gives the connection up."""

_POLL_SECONDS: Final = 1.0
_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 5.0

_log = logging.getLogger("flask_idempotency")


class RedisNotifier:
    """Implement `waiting.Notifier` with one subscription for all waiters of this process. The first waiter opens it.

    It uses one connection of the client. Redis keeps no message for an absent subscriber, so each new subscription wakes
    all waiters, and they read their records. A forked child starts without a subscription.
    """

    def __init__(
        self,
        subscriber: Callable[[], Any],
        *,
        idle_seconds: float = IDLE_SECONDS,
        ping_after_seconds: float = PING_AFTER_SECONDS,
    ) -> None:
        self._subscriber = subscriber
        self._idle_seconds = idle_seconds
        self._ping_after_seconds = ping_after_seconds
        self._start_empty()
        after_fork(self._start_empty)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._last_waiter_at = float("-inf")
        self._pause = _FIRST_PAUSE
        self.disconnected = self._is_closed = False

    @contextmanager
    def subscribe(self, keys: Sequence[StorageKey], wake: Callable[[], object]) -> Iterator[None]:
        notice()
        names = [layout.name(layout.keys(key)) for key in keys]
        with self._lock:
            for name in names:
                self._waiting[name] = [*self._waiting.get(name, ()), wake]
            if self._thread is None or not self._thread.is_alive():
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
            _log.exception("cannot start a thread for Redis notifications: waiting requests poll instead")
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
                        "Redis notifications are interrupted (%s): waiting requests poll instead", type(error).__name__
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

    def _listen(self) -> None:
        """Wake waiters by message until the subscription is idle. Raises if the connection breaks or stays silent."""
        subscriber = self._subscriber()
        try:
            subscriber.subscribe(layout.SETTLED)
            last_message_at, pinged = time.monotonic(), False
            while not self._ends_idle(idle_seconds=self._idle_seconds):
                message = subscriber.get_message(timeout=_POLL_SECONDS)
                if message is not None:
                    last_message_at, pinged = time.monotonic(), False
                    self._receive(message)
                    continue
                silent = time.monotonic() - last_message_at
                if silent > 2 * self._ping_after_seconds:
                    raise TimeoutError
                if silent > self._ping_after_seconds and not pinged:
                    subscriber.ping()
                    pinged = True
        finally:
            subscriber.close()

    def _receive(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            # Wake after the subscription stands: this process has received no message about earlier completions.
            self._wake(None)
            if self.disconnected:
                _log.info("Redis notifications work again")
            self.disconnected, self._pause = False, _FIRST_PAUSE
        elif message["type"] == "message":
            name = message["data"]
            self._wake(name.encode() if isinstance(name, str) else name)

    def _wake(self, name: bytes | None) -> None:
        """Wake the waiters of the record with this name, or all of them."""
        with self._lock:
            waiting = list(self._waiting.values()) if name is None else [self._waiting.get(name, [])]
            for wake in (wake for each in waiting for wake in each):
                wake()
