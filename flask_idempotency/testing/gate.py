"""One direction of a line, which a test opens, holds and shuts."""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

Stance: TypeAlias = Literal["open", "held", "dropping"]


class Gate:
    """What comes here passes at once, when it is let through, or never."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stance: Stance = "open"
        self._waiting = 0
        self._ended = threading.Event()
        self.delay_seconds = 0.0
        """What each piece waits before it passes."""

    @property
    def holds(self) -> bool:
        return self._stance == "held"

    def set(self, stance: Stance) -> None:
        """From now on, for what is being held as well."""
        with self._changed:
            self._stance = stance
            self._changed.notify_all()

    def end_holding(self) -> None:
        """Let through what is held; where everything is dropped it stays so."""
        with self._changed:
            if self._stance == "held":
                self.set("open")

    def passes(self) -> bool:
        """Whether this piece may go on, as soon as that is decided."""
        self._ended.wait(self.delay_seconds)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stance != "held")
            self._waiting -= 1
            return self._stance == "open"

    def caught(self, *, seconds: float) -> bool:
        """Whether something comes to be held in so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stance == "held" and self._waiting > 0, seconds)

    def end(self) -> None:
        """Nothing waits here any longer, and nothing passes."""
        self._ended.set()
        self.set("dropping")
