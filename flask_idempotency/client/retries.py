"""How often and how long a transport tries again."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["LONGEST_SECONDS", "Attempt", "Retries", "Timing"]

LONGEST_SECONDS: Final = 1e6
"""No call and no pause lasts longer: a socket takes no timeout above 24 days. The service has forgotten the key by then."""
LONGEST_GROWN_SECONDS: Final = 5.0
"""How long a call waits at most before it tries to connect again: as much later than a service that restarts."""
RETRY_COST: Final = 5
LOST_REPLY_COST: Final = 10
"""A server that loses replies is usually overloaded, so those retries use up the budget faster. AWS SDKs do the same."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that has ended. An observer gets it."""

    number: int
    """1 for the first attempt of a call."""
    status: int | None
    """None if no whole response came."""
    code: str | None
    error: Exception | None
    wait: float | None
    """Seconds until the next attempt, or None if the call ends here."""


async def _sleep(seconds: float) -> None:
    # httpx brings anyio. An import at the top would make the client need it without httpx.
    import anyio

    await anyio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock, the chance and the pauses of `Retries`. Tests replace them."""

    monotonic: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], None] = time.sleep
    async_sleep: Callable[[float], Awaitable[None]] = _sleep


@dataclass(frozen=True, slots=True)
class Retries:
    """When a transport sends a request again, and for how long.

    Each wait is the service's `Retry-After`, plus a random part of `backoff`. Two things do not count as attempts, and only
    `deadline` bounds them: a connection that could not be opened, and the answer that an earlier attempt still runs. With
    `attempts=1`, a connection is tried once too.

    Raises `ValueError` for values that cannot hold, and `TypeError` for those that are no numbers.
    """

    attempts: int = 5
    """The most attempts of one call that may have reached the service, without those that found an earlier one running."""
    backoff: tuple[float, ...] = (0.1, 0.2, 0.4)
    """The longest random wait before the first retry, the second, and so on, in seconds. The last one repeats. While no
    connection can be opened it doubles, up to 5 seconds."""
    deadline: float = 45.0
    """Seconds after which a call ends, at the latest after 1,000,000. It is longer than the service's default lease of 30, so
    that a call outlives a worker that died."""
    budget: int = 500
    """Tokens that all calls of one transport share. A retry takes 5, or 10 after a lost reply; success returns them.
    A connection that could not be opened takes none."""
    observer: Callable[[Attempt], None] | None = None
    """Called after each attempt. The `error` of an attempt may hold the request: do not log it whole."""
    timing: Timing = field(default_factory=Timing, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, kind in (("attempts", int), ("deadline", (int, float)), ("budget", int)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                number = "a whole number" if kind is int else "a number"
                raise TypeError(f"{name} must be {number}, not {type(value).__name__}.")
        backoff: Any = self.backoff
        if not isinstance(backoff, (tuple, list)) or not all(isinstance(wait, (int, float)) for wait in backoff):
            raise TypeError("backoff must be a tuple of numbers, such as (0.1, 0.2, 0.4).")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}. Allow at least 1.")
        if not self.backoff or not all(wait >= 0 for wait in self.backoff):
            raise ValueError(f"backoff is {self.backoff}. Give one or more waits in seconds, each at least 0.")
        if not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline}. Give a positive number of seconds.")
        if self.budget < 0:
            raise ValueError(f"budget is {self.budget}. Give at least 0.")

    def wait(self, retry: int, retry_after: float | None, *, growing: bool = False) -> float:
        """Return the seconds to wait before this retry. The first one is number 0. `growing` doubles the last of `backoff`."""
        longest = self.backoff[min(retry, len(self.backoff) - 1)]
        if growing and retry >= len(self.backoff):
            longest = max(longest, min(longest * 2.0 ** min(retry + 1 - len(self.backoff), 30), LONGEST_GROWN_SECONDS))
        return (retry_after or 0.0) + self.timing.uniform(0.0, min(longest, LONGEST_SECONDS))
