"""Leaves alone what does not answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from flask_idempotency.engine.forks import after_fork

FIRST_PAUSE_SECONDS = 1.0
"""A worker that waits in vain does so for tens of milliseconds: once a second takes a few hundredths of its time."""

LAST_PAUSE_SECONDS = 30.0
"""How long a server that is back may go unused."""

_log = logging.getLogger("flask_idempotency")


class Breaker:
    """Lets calls pass until one fails; from then on one at a time, after pauses that double, until one succeeds.

    Nobody ever waits here. A call that never reports back holds up nobody either: the next may try after the pause.
    """

    def __init__(self, name: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._turn = 0
        self._pause = 0.0
        self._retry_at: float | None = None
        after_fork(self._unlock)

    def turn(self) -> int | None:
        """A ticket for one call, to be given back by `succeeded` or `failed`; None for no call now."""
        turn = self._turn  # Before the state: a ticket of a state that has passed counts for nothing.
        if self._retry_at is None:
            return turn
        with self._lock:
            return self._probe()

    def succeeded(self, turn: int) -> None:
        """Everybody may call again, unless others have failed since this ticket was given out."""
        if self._retry_at is None:
            return
        with self._lock:
            if turn != self._turn:
                return
            self._turn += 1
            self._retry_at = None
        _log.info("%s answers again", self._name)

    def failed(self, turn: int, why: str) -> None:
        """Nobody calls for a while. Of many that fail together the first counts."""
        with self._lock:
            if turn != self._turn:
                return
            opened = self._retry_at is None
            self._turn += 1
            self._pause = FIRST_PAUSE_SECONDS if opened else min(2 * self._pause, LAST_PAUSE_SECONDS)
            self._retry_at = self._monotonic() + self._pause
        if opened:
            _log.warning("%s does not answer (%s): it is left alone, and tried again now and then", self._name, why)

    def _unlock(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._lock = threading.Lock()

    def _probe(self) -> int | None:
        now = self._monotonic()
        if self._retry_at is None or now < self._retry_at:
            return None
        self._turn += 1
        self._retry_at = now + self._pause
        return self._turn
