"""One application's chores: each done by one at a time, written down, and told."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

from flask_idempotency.engine.capabilities import ChoreBook
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import ChoreDone, Event
from flask_idempotency.maintenance.drain import Drain

Chore: TypeAlias = Literal["reap", "expire", "rotate", "reconcile", "heartbeat"]
CHORES: Final[tuple[Chore, ...]] = ("reap", "expire", "rotate", "reconcile", "heartbeat")

LOCK_SECONDS: Final = 60.0
"""How long a chore may go on after its budget is spent, before somebody else takes it for dead and begins."""

_log = logging.getLogger("flask_idempotency")


class Report(Protocol):
    """What a run has done: a frozen dataclass of numbers, and whether it came to its end."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def finished(self) -> bool: ...


Work: TypeAlias = Callable[[float, Drain], Report]
"""Does a chore, given its horizon (seconds since the epoch, store's clock) and its pace."""


class Janitor:
    """Runs the chores that its store has work for. Running one twice at once is safe: the lock only saves work."""

    def __init__(
        self,
        work: Mapping[Chore, Work],
        *,
        book: ChoreBook | None,
        observers: Callable[[Event], None],
        host_clock: Callable[[], float] = time.time,
    ) -> None:
        self._work = work
        self._book = book
        self._observers = observers
        self._host_clock = host_clock

    @property
    def chores(self) -> tuple[Chore, ...]:
        """Those that there is anything to do for, in this application and its store."""
        return tuple(chore for chore in CHORES if chore in self._work)

    def run(self, chore: Chore, drain: Drain) -> Report | None:
        """Do this chore now. None: somebody else is at it.

        It goes by the store's clock, and by this host's where that is behind: a clock that was set forward by mistake must
        not have anything removed that it ends. Raises `StoreUnavailable` when the store does not answer, and `KeyError`
        for a chore that is not among `chores`.
        """
        work = self._work[chore]
        token = secrets.token_bytes(16)
        began = drain.monotonic()
        try:
            if self._book is not None and not self._book.take(chore, token, lease=drain.budget + LOCK_SECONDS):
                return None
            return self._done(chore, work, drain, token, began)
        except Exception as error:
            seconds = drain.monotonic() - began
            self._observers(ChoreDone("", chore, seconds, counts={}, finished=False, error=type(error).__name__))
            raise

    def _done(self, chore: Chore, work: Work, drain: Drain, token: bytes, began: float) -> Report:
        try:
            report = work(self._horizon(), drain)
            self._write_down(chore, report, seconds=drain.monotonic() - began)
        finally:
            self._give_back(chore, token)
        return report

    def _horizon(self) -> float:
        host_now = self._host_clock()
        return host_now if self._book is None else min(self._book.now(), host_now)

    def _write_down(self, chore: Chore, report: Report, *, seconds: float) -> None:
        counts = {name: count for name, count in asdict(report).items() if name != "finished"}
        if self._book is not None:
            told = {**counts, "finished": report.finished, "seconds": round(seconds, 3)}
            self._book.note(chore, json.dumps(told, separators=(",", ":")))
        self._observers(ChoreDone("", chore, seconds, counts=counts, finished=report.finished))

    def _give_back(self, chore: Chore, token: bytes) -> None:
        if self._book is None:
            return
        try:
            self._book.give_back(chore, token)
        except StoreUnavailable as error:
            _log.warning("the lock of %s was not given back, and will run out (%s)", chore, type(error).__name__)
