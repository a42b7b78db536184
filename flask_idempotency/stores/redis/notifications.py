"""Pub/sub messages that wake waiting requests when another process completes or releases their key."""

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
"""For how long nobody must have waited before the connection is given up: where some wait, others soon will."""

PATIENCE_SECONDS: Final = 5.0
"""After this long without a word the server is asked whether it is there; after as long again it is not."""

LOOK_SECONDS: Final = 1.0
_PAUSES: Final = 0.1, 5.0

_log = logging.getLogger("flask_idempotency")


class RedisNotifier:
    """Implements `waiting.Bell`: one subscription for all who wait in this process, made when the first of them comes.

    It takes one connection of the client's. Redis keeps no message for who is not there: when the subscription is made,
    and each time that it is made anew, everybody who waits is told to look. A forked child starts with none.
    """

    def __init__(
        self,
        subscriber: Callable[[], Any],
        *,
        idle_seconds: float = IDLE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._subscriber = subscriber
        self._idle_seconds = idle_seconds
        self._patience_seconds = patience_seconds
        self._start_empty()
        after_fork(self._start_empty)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._left_at = float("-inf")
        self._pause = _PAUSES[0]
        self.deaf = self._is_closed = False

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
                    self._leave(name, wake)
                self._left_at = time.monotonic()

    def close(self) -> None:
        """Give the connection up as soon as nobody waits."""
        self._left_at = float("-inf")
        self._is_closed = True

    def _leave(self, name: bytes, wake: Callable[[], object]) -> None:
        waiting = self._waiting.pop(name, [])
        if wake in waiting:
            waiting.remove(wake)
        if waiting:
            self._waiting[name] = waiting

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="idempotency-bell", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _log.exception("no thread can be started: those who wait for a key look for themselves")
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                self._listen()
                return
            except Exception as error:  # noqa: BLE001 - a client may raise anything, and those who wait look for themselves
                if not self.deaf and not self._is_closed:
                    _log.warning(
                        "nothing is heard of keys that are settled elsewhere (%s): those who wait look for themselves",
                        type(error).__name__,
                    )
                self.deaf = True
            time.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads a herd, hides nothing
            self._pause = min(2 * self._pause, _PAUSES[1])
            if self._is_over(idle_seconds=0.0):
                return

    def _is_over(self, *, idle_seconds: float) -> bool:
        """Whether nobody has waited for so long. If so this thread ends, and whoever waits next starts another."""
        with self._lock:
            over = not self._waiting and time.monotonic() - self._left_at >= idle_seconds
            if over:
                self._thread = None
            return over

    def _listen(self) -> None:
        """Pass on what is heard until nobody has waited for long. Raises when nothing more can be heard."""
        subscriber = self._subscriber()
        try:
            subscriber.subscribe(layout.SETTLED)
            heard_at, asked = time.monotonic(), False
            while not self._is_over(idle_seconds=self._idle_seconds):
                message = subscriber.get_message(timeout=LOOK_SECONDS)
                if message is not None:
                    heard_at, asked = time.monotonic(), False
                    self._hear(message)
                    continue
                silent = time.monotonic() - heard_at
                if silent > 2 * self._patience_seconds:
                    raise TimeoutError
                if silent > self._patience_seconds and not asked:
                    subscriber.ping()
                    asked = True
        finally:
            subscriber.close()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            # Now and not before: what was settled until now nobody here was told of.
            self._wake(None)
            if self.deaf:
                _log.info("keys that are settled elsewhere are heard of again")
            self.deaf, self._pause = False, _PAUSES[0]
        elif message["type"] == "message":
            name = message["data"]
            self._wake(name.encode() if isinstance(name, str) else name)

    def _wake(self, name: bytes | None) -> None:
        """Have those look who wait for what is called so, or all of them."""
        with self._lock:
            waiting = list(self._waiting.values()) if name is None else [self._waiting.get(name, [])]
            for wake in (wake for each in waiting for wake in each):
                wake()
