"""Which chores were done, and clearing out what is over."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count

from flask_idempotency.engine.capabilities import LONGEST_LOCK_SECONDS, Entry, Finding, Verdict
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.memory.room import Room, is_over


class MemoryChores:
    """Implements `chores.ChoreBook`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._noted: dict[str, tuple[float, str]] = {}
        self._held: dict[str, tuple[bytes, float]] = {}

    def now(self) -> float:
        with self._room.lock:
            return self._room.now()

    def note(self, chore: str, report: str) -> None:
        with self._room.lock:
            self._noted[chore] = self._room.now(), report

    def last(self) -> Mapping[str, Entry]:
        with self._room.lock:
            now = self._room.now()
            return {chore: Entry(max(now - at, 0.0), report) for chore, (at, report) in self._noted.items()}

    def take(self, chore: str, token: bytes, *, lease: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            holder, until = self._held.get(chore, (token, now))
            if holder != token and now < until <= now + LONGEST_LOCK_SECONDS:
                return False
            self._held[chore] = token, now + lease
            return True

    def give_back(self, chore: str, token: bytes) -> None:
        with self._room.lock:
            if self._held.get(chore, (b"", 0.0))[0] == token:
                del self._held[chore]


class MemoryExpiry:
    """Implements `chores.Expiry`. Knows when each answer's life ends, so that nothing has to be looked through."""

    def __init__(self, room: Room, *, put: Callable[[StorageKey, Record | None], None]) -> None:
        self._room = room
        self._put = put
        self._ends: list[tuple[float, int, StorageKey]] = []
        self._order = count()

    def sweep(self, *, horizon: float, limit: int) -> int:
        with self._room.lock:
            return self.drop(min(horizon, self._room.now()), limit)

    # What follows is called by the store, which holds the lock.

    def entered(self, key: StorageKey, deadline: float) -> None:
        heapq.heappush(self._ends, (deadline, next(self._order), key))

    def drop(self, horizon: float, limit: int) -> int:
        """Forget up to `limit` of what was over by then. An entry whose record lives on, or has gone, is dropped as well."""
        dropped = 0
        while dropped < limit and self._ends and self._ends[0][0] <= horizon:
            _, _, key = heapq.heappop(self._ends)
            record = self._room.records.get(key)
            if record is not None and is_over(record, horizon):
                self._put(key, None)
            dropped += 1
        return dropped


class MemoryHealth:
    """Implements `health.Health`."""

    def findings(self) -> tuple[Finding, ...]:
        return (
            Finding(
                "persistence",
                Verdict.FAULT,
                "Records are in the memory of one process: they are forgotten when it ends, and no other process knows them.",
                "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money.",
            ),
        )
