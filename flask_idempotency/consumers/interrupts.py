"""Hold off the signals whose handlers raise, so that they end the body of a task and never a write of ours.

A pool child of Celery gets SIGUSR1 at its soft time limit, and SIGTERM or SIGQUIT when it must end. The handlers raise in
whatever the main thread is doing. In the middle of a statement SQLAlchemy turns that into an error of its own, psycopg loses
the connection, and hiredis 3 crashes the process.

Python runs handlers in the main thread only, and so everything here is for that thread: other threads and the greenlets of a
pool are never interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

SOFT_LIMIT: Final = getattr(signal, "SIGUSR1", None)
"""The signal of a soft time limit, which is about the body alone."""

_HELD: Final = tuple(
    getattr(signal, name) for name in ("SIGUSR1", "SIGTERM", "SIGQUIT", "SIGHUP") if hasattr(signal, name)
)


class NotStarted(Exception):
    """A signal came before the body began. `__cause__` is what its handler raised."""


class _Held:
    """Our handler in place of an application's. It knows that one itself: a later handler may keep ours and call it."""

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.number = number
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Run the handler, or note the signal while it is held off."""
        if not _interrupts.held:
            self.handler(number, frame)
        elif all(each.number != number for each in _interrupts.waiting):
            _interrupts.waiting.append(self)


class _Interrupts:
    """The signals of this process. A forked child inherits the handlers, and begins with nothing held."""

    held = False

    def __init__(self) -> None:
        self.waiting: list[_Held] = []

    def deliver(self) -> None:
        """Run the handlers of the signals that came, the oldest first. One that raises leaves the later ones waiting."""
        while self.waiting:
            came = self.waiting.pop(0)
            came.handler(came.number, None)


_interrupts = _Interrupts()


@contextmanager
def held_off() -> Iterator[None]:
    """Hold the signals off in this context, except in `let_through`. Those that came run their handlers at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _interrupts.held
    try:
        # Put ours before every Python handler of these signals. Others set theirs late, so look each time.
        for number in _HELD:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, _Held | signal.Handlers):
                signal.signal(number, _Held(number, handler))
        _interrupts.held = True
        yield
    finally:
        _interrupts.held = before
        if not before:
            _interrupts.deliver()


def forget_soft_limit() -> None:
    """Drop a soft time limit that came while it was held off: the body has ended, or will not begin."""
    if threading.current_thread() is threading.main_thread():
        _interrupts.waiting[:] = [each for each in _interrupts.waiting if each.number != SOFT_LIMIT]


def let_through(body: Callable[[], T]) -> T:
    """Run the body, which signals may end. Raises `NotStarted` if one came before."""
    if threading.current_thread() is not threading.main_thread() or not _interrupts.held:
        return body()
    try:
        _interrupts.held = False
        try:
            _interrupts.deliver()
        except BaseException as error:
            raise NotStarted from error
        return body()
    finally:
        _interrupts.held = True
