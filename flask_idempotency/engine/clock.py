"""Whose time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Answers "what time is it?" in seconds since the epoch, or declines with None.

    Stores compare deadlines against their own server's time, because two web hosts never agree to the millisecond.
    Returning None keeps it so; tests return a number instead and make time pass by assignment.
    """

    def __call__(self) -> float | None: ...


def store_time() -> None:
    """The production clock: declines, so that the store's own time decides."""
    return


class SteadyClock:
    """Seconds since the epoch that never step: read once, then advanced by the monotonic clock.

    The memory store's own time. A wall clock set back by an operator must not lengthen a lease, one set forward must
    not end them all at once.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
