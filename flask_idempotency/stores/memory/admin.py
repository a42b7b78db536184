"""The records of the memory store, and what the janitor, the command line and `doctor` call of it."""

from __future__ import annotations

import heapq
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf

from flask_idempotency.engine.capabilities import (
    LONGEST_LOCK_SECONDS,
    Answer,
    DataKey,
    Finding,
    Page,
    RecordPage,
    SeenRecord,
    TaskReport,
    TenantKeys,
    UnfinishedCounts,
    Verdict,
)
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, OnExpiry, OverQuota, Record, State, StoredPayload
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage, window_of
from flask_idempotency.engine.recovery import LAPSED
from flask_idempotency.engine.store import Clock, SteadyClock


class MemoryRecords:
    """The records, the time, and the lock that each caller takes before it reads or writes here."""

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


class MemoryTaskLog:
    """Implements `capabilities.TaskLog`."""

    def __init__(self, room: MemoryRecords) -> None:
        self._room = room
        self._noted: dict[str, tuple[float, str]] = {}
        self._held: dict[str, tuple[bytes, float]] = {}

    def now(self) -> float:
        with self._room.lock:
            return self._room.now()

    def report(self, chore: str, report: str) -> None:
        with self._room.lock:
            self._noted[chore] = self._room.now(), report

    def reports(self) -> Mapping[str, TaskReport]:
        with self._room.lock:
            now = self._room.now()
            return {chore: TaskReport(max(now - at, 0.0), report) for chore, (at, report) in self._noted.items()}

    def lock(self, chore: str, token: bytes, *, lease: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            holder, until = self._held.get(chore, (token, now))
            if holder != token and now < until <= now + LONGEST_LOCK_SECONDS:
                return False
            self._held[chore] = token, now + lease
            return True

    def unlock(self, chore: str, token: bytes) -> None:
        with self._room.lock:
            if self._held.get(chore, (b"", 0.0))[0] == token:
                del self._held[chore]


class MemoryExpiry:
    """Implements `capabilities.Expiry`. Knows when each answer's life ends, so that nothing has to be looked through."""

    def __init__(self, room: MemoryRecords, *, put: Callable[[StorageKey, Record | None], None]) -> None:
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
    """Implements `capabilities.Health`."""

    def findings(self) -> tuple[Finding, ...]:
        return (
            Finding(
                "persistence",
                Verdict.FAULT,
                "Records are in the memory of one process: they are forgotten when it ends, and no other process knows them.",
                "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money.",
            ),
        )


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
    """Implements `capabilities.Ledger`."""

    def __init__(self, room: MemoryRecords) -> None:
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
                if not record.in_quota:
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


@dataclass(slots=True)
class _Tenant:
    keys: dict[int, DataKey] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    last: int = 0
    destroyed: int = 0
    erased_at: float | None = None


class MemoryDataKeys:
    """Implements `capabilities.DataKeys`."""

    def __init__(self, room: MemoryRecords) -> None:
        self._room = room
        self._store = secrets.token_bytes(16)
        self._tenants: dict[bytes, _Tenant] = {}

    def read_keys(self, tid: bytes) -> TenantKeys:
        with self._room.lock:
            tenant = self._of(tid)
            return TenantKeys(self._store, tuple(self._as_of_now(tenant)), tenant.last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        with self._room.lock:
            tenant = self._of(tid)
            if store != self._store or tenant.last != after or key.number <= after:
                return False
            tenant.keys[key.number] = key
            tenant.last = key.number
            return True

    def disable(self, tid: bytes, number: int) -> None:
        with self._room.lock:
            tenant = self._of(tid)
            if number in tenant.keys:
                tenant.closed.setdefault(number, self._room.now())

    def delete(self, tid: bytes, number: int) -> None:
        with self._room.lock:
            tenant = self._of(tid)
            if tenant.closed.pop(number, None) is not None:
                del tenant.keys[number]

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        with self._room.lock:
            return [
                (tid, key) for tid, each in self._tenants.items() for key in self._as_of_now(each) if key.kid != kid
            ]

    def shred(self, tid: bytes) -> int:
        with self._room.lock:
            tenant = self._of(tid)
            gone = len(tenant.keys)
            tenant.keys.clear()
            tenant.closed.clear()
            tenant.destroyed, tenant.erased_at = tenant.last, self._room.now()
            return gone

    def count(self) -> Mapping[str, int]:
        with self._room.lock:
            return Counter(key.kid for tenant in self._tenants.values() for key in tenant.keys.values())

    # What follows is called by the store, which holds the lock.

    def check(self, tid: bytes, record: Record, payload: StoredPayload) -> None:
        """Raises `DataKeyMissing` when this record may not be completed with this payload."""
        if payload.sealed_by is None or payload.sealed_by.number == 0:
            return
        tenant = self._of(tid)
        if tenant.erased_at is not None and record.requested_at <= tenant.erased_at:
            raise DataKeyMissing("the tenant's answers were erased since the key was first used", erased=True)
        if payload.sealed_by.number not in tenant.keys or payload.sealed_by.number in tenant.closed:
            raise DataKeyMissing("there is no open data key of this number", erased=False)

    def told(self, key: StorageKey, record: Record) -> Record:
        """This record, with what is known of the key that it was sealed with."""
        tenant = self._tenants.get(key.tid)
        if record.payload is None or tenant is None or tenant.erased_at is None:
            return record
        by = record.payload.sealed_by
        erased = record.requested_at <= tenant.erased_at if by is None else by.number <= tenant.destroyed
        return replace(record, erased=True) if erased else record

    def _as_of_now(self, tenant: _Tenant) -> Iterator[DataKey]:
        now = self._room.now()
        for number, key in tenant.keys.items():
            closed = tenant.closed.get(number)
            yield key if closed is None else replace(key, closed_for=now - closed)

    def _of(self, tid: bytes) -> _Tenant:
        return self._tenants.setdefault(tid, _Tenant())


class MemoryResponses:
    """Implements `capabilities.Responses`."""

    def __init__(self, room: MemoryRecords, shelf: MemoryDataKeys) -> None:
        self._room = room
        self._shelf = shelf

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        with self._room.lock:
            now = self._room.now()
            keys = sorted((key for key in self._room.records if key.rid > after), key=lambda key: key.rid)[: limit + 1]
            live = [(key, self._room.live(key, now)) for key in keys[:limit]]
            met = [
                Answer(key, self._shelf.told(key, record))
                for key, record in live
                if record is not None and record.state is State.COMPLETED and tid in (None, key.tid)
            ]
            wanted = tuple(answer for answer in met if other_than is None or _kid(answer.record) != other_than)
            return Page(wanted, after=keys[limit - 1].rid if len(keys) > limit else None)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        with self._room.lock:
            record = self._room.live(key, self._room.now())
            if record is None or record.state is not State.COMPLETED or record.payload != old:
                return False
            self._shelf.check(key.tid, record, new)
            self._room.records[key] = replace(record, payload=new)
            return True

    def count(self) -> Mapping[str, int]:
        with self._room.lock:
            completed = (record for record in self._room.records.values() if record.state is State.COMPLETED)
            return Counter(_kid(record) for record in completed if not _is_wiped(record))


def _is_wiped(record: Record) -> bool:
    return record.payload is not None and record.payload.sealed_by == ERASED


def _kid(record: Record) -> str:
    return "" if record.payload is None or record.payload.sealed_by is None else record.payload.sealed_by.kid


class MemoryRecovery:
    """Implements `capabilities.Recovery`. `put` and `complete` are the store's own, which keep its ledger right."""

    def __init__(
        self,
        room: MemoryRecords,
        *,
        put: Callable[[StorageKey, Record | None], None],
        complete: Callable[[StorageKey, Record, StoredPayload, float, float], None],
        told: Callable[[StorageKey, Record, float], Record],
    ) -> None:
        self._room = room
        self._put = put
        self._complete = complete
        self._told = told
        self._not_completed: dict[StorageKey, Record] = {}
        self._turns: dict[StorageKey, float] = {}

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        return self._sheet(self._not_completed, lambda record, now: _is_stale(record, min(horizon, now)), after, limit)

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            record = self._as_seen(seen, now)
            if record is None or not _is_stale(record, min(horizon, now)) or record.on_expiry is OnExpiry.TAKEOVER:
                return False
            self._put(seen.key, replace(record, state=State.QUARANTINED, reason=LAPSED))
            return True

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        with self._room.lock:
            now = self._room.now()
            quarantined = {
                key: record
                for key, record in self._not_completed.items()
                if record.state is State.QUARANTINED and (owner is None or record.token.startswith(owner))
            }
            waiting = sorted(quarantined, key=lambda key: self._turns.get(key, quarantined[key].deadline))
            come = (key for key in waiting if self._turns.get(key, -inf) <= min(horizon, now))
            taken = list(islice(come, limit))
            found = [
                SeenRecord(key, self._told(key, record, now), asked=self._turns.get(key, -inf) > record.deadline)
                for key, record in ((key, quarantined[key]) for key in taken)
            ]
            for key in taken:
                self._turns[key] = min(horizon, now) + min(max(now - quarantined[key].deadline, least), most)
            return found

    def resolve(self, seen: SeenRecord, *, token: bytes, payload: StoredPayload, keep: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            record = self._room.live(seen.key, now)
            if record is not None and record.state is State.COMPLETED and record.token == token:
                return True
            record = self._as_seen(seen, now)
            if record is None or record.state is not State.QUARANTINED:
                return False
            self._complete(seen.key, replace(record, token=token), payload, keep, now)
            return True

    def force_release(self, seen: SeenRecord) -> bool:
        with self._room.lock:
            if self._as_seen(seen, self._room.now()) is None:
                return False
            self._put(seen.key, None)
            return True

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        records = self._room.records if state is State.COMPLETED else self._not_completed
        return self._sheet(
            records, lambda record, now: record.state is state and not is_over(record, now), after, limit, tid=tid
        )

    def counts(self) -> UnfinishedCounts:
        with self._room.lock:
            now = self._room.now()
            records = self._not_completed.values()
            processing = [record for record in records if record.state is State.PROCESSING]
            lapsed = [now - record.deadline for record in processing if record.deadline <= now]
            quarantined = [max(now - record.deadline, 0.0) for record in records if record.state is State.QUARANTINED]
            return UnfinishedCounts(
                in_flight=len(processing) - len(lapsed),
                lapsed=len(lapsed),
                quarantined=len(quarantined),
                lapsed_for=max(lapsed, default=None),
                quarantined_for=max(quarantined, default=None),
            )

    def _sheet(
        self,
        records: Mapping[StorageKey, Record],
        wanted: Callable[[Record, float], bool],
        after: bytes,
        limit: int,
        *,
        tid: bytes | None = None,
    ) -> RecordPage:
        with self._room.lock:
            now = self._room.now()
            left = (key for key in records if key.rid > after)
            keys = heapq.nsmallest(limit + 1, left, key=lambda key: key.rid)
            met = ((key, records[key]) for key in keys[:limit] if tid in (None, key.tid))
            found = tuple(SeenRecord(key, self._told(key, record, now)) for key, record in met if wanted(record, now))
            return RecordPage(found, after=keys[limit - 1].rid if len(keys) > limit else None)

    def _as_seen(self, seen: SeenRecord, now: float) -> Record | None:
        record = self._room.live(seen.key, now)
        if record is None:
            return None
        same = (record.state, record.token, record.deadline) == (
            seen.record.state,
            seen.record.token,
            seen.record.deadline,
        )
        return record if same else None

    # What follows is called by the store, which holds the lock.

    def moved(self, key: StorageKey, record: Record | None) -> None:
        if record is None or record.state is State.COMPLETED:
            self._not_completed.pop(key, None)
            # Should it be quarantined anew, that is another question, and its first turn is at once.
            self._turns.pop(key, None)
        else:
            self._not_completed[key] = record


def _is_stale(record: Record, now: float) -> bool:
    return record.state is State.PROCESSING and record.deadline <= now
