"""What each tenant has, counted as its records come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OverQuota, Record, State
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage, window_of
from flask_idempotency.stores.memory.room import Room


@dataclass(slots=True)
class _Books:
    """One tenant's. `buckets` has records and bytes by the edge at which they end, in seconds."""

    unsettled: int = 0
    running: set[StorageKey] = field(default_factory=set)
    buckets: dict[float, tuple[int, int]] = field(default_factory=dict)
    windows: dict[float, tuple[int, int]] = field(default_factory=dict)
    """New keys, by the length of the window: its number, and how many it has seen."""
    limits: Quota = field(default_factory=Quota)


class MemoryLedger:
    """Implements `upkeep.Ledger`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._books: dict[bytes, _Books] = {}

    def usage(self, tid: bytes) -> Usage:
        with self._room.lock:
            books, now = self._of(tid), self._room.now()
            records, stored = self._kept(books, now)
            return Usage(
                records=books.unsettled + records,
                bytes=stored,
                in_flight=len(self._leases(books, now)),
                new_keys=max((self._seen(books, NewKeys(0, seconds), now) for seconds in books.windows), default=0),
            )

    def limits(self, tid: bytes) -> Quota:
        with self._room.lock:
            return self._of(tid).limits

    def limit(self, tid: bytes, quota: Quota) -> None:
        with self._room.lock:
            self._of(tid).limits = quota

    def tenants(self) -> Sequence[bytes]:
        with self._room.lock:
            return tuple(self._books)

    def reconcile(self, tid: bytes) -> Drift:
        with self._room.lock:
            now, books = self._room.now(), self._of(tid)
            said, said_bytes = self._kept(books, now)
            unsettled, buckets = 0, dict[float, tuple[int, int]]()
            running = set()
            for key, record in self._room.of_tenant(tid, now):
                if not record.counted:
                    continue
                if record.state is State.COMPLETED:
                    count, size = buckets.get(record.deadline, (0, 0))
                    buckets[record.deadline] = count + 1, size + _size(record)
                else:
                    unsettled += 1
                if record.state is State.PROCESSING:
                    running.add(key)
            counted, size = sum(n for n, _ in buckets.values()), sum(size for _, size in buckets.values())
            drift = Drift(said - counted, said_bytes - size, books.unsettled - unsettled)
            books.unsettled, books.buckets, books.running = unsettled, buckets, running
            return drift

    # What follows is called by the store, which holds the lock.

    def refuses(self, tid: bytes, quota: Quota, now: float) -> OverQuota | None:
        """Why one more key of this tenant must not be granted."""
        books = self._of(tid)
        quota = quota.overlaid(books.limits)
        records, stored = self._kept(books, now)
        ends = min(books.buckets, default=now) - now
        leases = self._leases(books, now)
        if quota.records is not None and books.unsettled + records >= quota.records:
            return OverQuota("records", quota.records, retry_after=ends)
        if quota.bytes is not None and stored >= quota.bytes:
            return OverQuota("bytes", quota.bytes, retry_after=ends)
        if quota.in_flight is not None and len(leases) >= quota.in_flight:
            return OverQuota("in-flight", quota.in_flight, retry_after=min(leases, default=now) - now)
        if quota.new_keys is not None:
            _, left = window_of(int(now * 1_000_000), quota.new_keys)
            if self._seen(books, quota.new_keys, now) >= quota.new_keys.count:
                return OverQuota("new-keys", quota.new_keys.count, left / 1_000_000, quota.new_keys.seconds)
        return None

    def admitted(self, tid: bytes, quota: Quota, now: float) -> None:
        """One more new key was granted."""
        books = self._of(tid)
        rate = quota.overlaid(books.limits).new_keys
        if rate is not None:
            number, _ = window_of(int(now * 1_000_000), rate)
            books.windows[rate.seconds] = number, self._seen(books, rate, now) + 1

    def entered(self, key: StorageKey, record: Record) -> None:
        """This record is there from now on."""
        books = self._of(key.tid)
        if record.state is State.COMPLETED:
            count, size = books.buckets.get(record.deadline, (0, 0))
            books.buckets[record.deadline] = count + 1, size + _size(record)
            return
        books.unsettled += 1
        if record.state is State.PROCESSING:
            books.running.add(key)

    def left(self, key: StorageKey, record: Record) -> None:
        """This record is gone, or has become another. One whose bucket has ended is counted no more anyway."""
        books = self._of(key.tid)
        if record.state is not State.COMPLETED:
            books.unsettled -= 1
            books.running.discard(key)
        elif record.deadline in books.buckets:
            count, size = books.buckets[record.deadline]
            books.buckets[record.deadline] = count - 1, size - _size(record)

    def _of(self, tid: bytes) -> _Books:
        return self._books.setdefault(tid, _Books())

    def _seen(self, books: _Books, rate: NewKeys, now: float) -> int:
        number, seen = books.windows.get(rate.seconds, (-1, 0))
        return seen if number == window_of(int(now * 1_000_000), rate)[0] else 0

    def _kept(self, books: _Books, now: float) -> tuple[int, int]:
        for edge in [edge for edge in books.buckets if edge <= now]:
            del books.buckets[edge]
        return sum(n for n, _ in books.buckets.values()), sum(size for _, size in books.buckets.values())

    def _leases(self, books: _Books, now: float) -> list[float]:
        ends = (self._room.records[key].deadline for key in books.running)
        return [deadline for deadline in ends if deadline > now]


def _size(record: Record) -> int:
    return 0 if record.payload is None else record.payload.byte_size
