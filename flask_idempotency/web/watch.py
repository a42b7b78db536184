"""Noticing that nobody sweeps. That costs space and keeps unknown outcomes waiting; no promise hangs on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from threading import Lock

from flask_idempotency.assembly import Built, in_one_process
from flask_idempotency.engine.chores import ChoreBook
from flask_idempotency.engine.events import Event, JanitorMissing
from flask_idempotency.settings import Settings

_log = logging.getLogger("flask_idempotency")


def watch_of(built: Built, settings: Settings, observers: Callable[[Event], None]) -> Watch | None:
    """None where no janitor is expected, where nothing tells whether one came, and where none can see the records."""
    if built.chores is None or settings.heartbeat_every is None or in_one_process(settings):
        return None
    return Watch(built.chores, observers, every=settings.heartbeat_every)


class Watch:
    """Asks the store now and then whether a janitor has reported, and tells once when none has for two intervals.

    Any chore counts, whoever did it: cron has no heartbeat. After one has reported again, the next silence is told anew.
    """

    def __init__(
        self,
        book: ChoreBook,
        observers: Callable[[Event], None],
        *,
        every: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._observers = observers
        self._patience = 2 * every
        self._monotonic = monotonic
        self._lock = Lock()
        self._began: float | None = None
        self._due = -inf
        self._told = False

    def look(self) -> None:
        """Called as each keyed request ends. Nearly always it only looks at a clock, and it never fails."""
        now = self._monotonic()
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return  # another thread has been sent
            self._due = now + self._patience
            if self._began is None:
                # The janitor may be starting as we are.
                self._began = now
                return
        self._ask(watched=now - self._began)

    def _ask(self, *, watched: float) -> None:
        try:
            silence = min((entry.ago for entry in self._book.last().values()), default=None)
        except Exception as error:  # noqa: BLE001 - the answer is given, and nothing may spoil it
            _log.debug("whether a janitor comes is not known (%s)", type(error).__name__)
            return
        missing = silence is None or silence > self._patience
        if missing and not self._told:
            self._observers(JanitorMissing("", "", watched if silence is None else silence))
        self._told = missing
