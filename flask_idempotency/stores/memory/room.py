"""What the parts of a memory store share: the records, the time, and the lock that all of them take."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, State
from flask_idempotency.engine.store import Clock, SteadyClock


class Room:
    """Holds records and does nothing with them. Whoever reads or writes here holds the lock."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self.records: dict[StorageKey, Record] = {}
        self._clock = clock
        self._own_time = SteadyClock()

    def now(self) -> float:
        told = self._clock()
        return self._own_time() if told is None else told

    def live(self, key: StorageKey, now: float) -> Record | None:
        """The record of a key that is not absent."""
        record = self.records.get(key)
        return None if record is None or is_over(record, now) else record

    def of_tenant(self, tid: bytes, now: float) -> Iterator[tuple[StorageKey, Record]]:
        return ((key, record) for key, record in self.records.items() if key.tid == tid and not is_over(record, now))


def is_over(record: Record, now: float) -> bool:
    return record.state is State.COMPLETED and record.deadline <= now
