"""A clock that stands still until it is told otherwise."""

from __future__ import annotations


class FrozenClock:
    """A `Clock` for tests: time passes by `advance`, forwards or backwards, and in no other way."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this much time pass; negative sets the clock back, as an operator may."""
        self.now += seconds
