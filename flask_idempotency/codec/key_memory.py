"""Unwrapped data keys, for as long as they may be remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from flask_idempotency.engine.forks import after_fork

MEMORY_SECONDS: Final = 60.0
"""After this a key is asked for again: so long may a provider's refusal take to be felt."""
FINISHING_SECONDS: Final = 300.0
"""So long may work that was begun with a key be finished with it, though the provider is silent by then. No longer is a
key in memory, counted from when it was unwrapped, if another one comes after it."""
MEMORY_KEYS: Final = 4096
"""About two megabytes. A tenant beyond that costs a look into the store, and an unwrapping, for each answer."""

Name: TypeAlias = "tuple[bytes, int | None]"


@dataclass(frozen=True, slots=True)
class OpenKey:
    """A tenant's data key as it seals and opens, and what an answer that it sealed says of it."""

    key: bytes = field(repr=False)
    kid: str
    number: int
    store: bytes = field(repr=False)
    wrapped: bytes = field(repr=False)
    """As the store had it: two keys of one number are the same one if this is."""


class KeyMemory:
    """Forgets by age, and the oldest when it is full. Not the least used: nothing lives long enough, and reads need no lock."""

    def __init__(self, *, limit: int = MEMORY_KEYS, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: dict[Name, tuple[float, OpenKey]] = {}
        """The oldest first."""
        after_fork(self._unlock)

    def __len__(self) -> int:
        return len(self._held)

    def now(self) -> float:
        return self._monotonic()

    def get(self, name: Name, *, within: float) -> OpenKey | None:
        """What is remembered under this name, if it was learnt within so many seconds."""
        since, key = self._held.get(name, (0.0, None))
        return key if key is not None and self._monotonic() - since < within else None

    def put(self, name: Name, key: OpenKey, *, since: float) -> None:
        """Remember it as of then: when it was asked for, not when the answer came."""
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = since, key
            self._drop_old()

    def drop(self, tid: bytes) -> None:
        """Nothing of this tenant is remembered."""
        with self._lock:
            for name in [name for name in self._held if name[0] == tid]:
                del self._held[name]

    def _unlock(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._lock = threading.Lock()

    def _drop_old(self) -> None:
        now = self._monotonic()
        while self._held:
            name, (since, _) = next(iter(self._held.items()))
            if len(self._held) <= self._limit and now - since < FINISHING_SECONDS:
                return
            del self._held[name]
