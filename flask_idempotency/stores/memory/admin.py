"""What the janitor, the command line and `doctor` call on the memory store: one class for each capability.

All classes share one `MemoryRecords` with the store: the records, the clock and the lock.
"""

from __future__ import annotations

import heapq
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf

from flask_idempotency.engine.capabilities import (
    Answer,
    DataKey,
    Finding,
    Page,
    RecordPage,
    SeenRecord,
    TenantKeys,
    UnfinishedCounts,
    Verdict,
)
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.journal import Entry
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ERASED,
    LAPSED,
    OnExpiry,
    OverQuota,
    Record,
    State,
    StoredPayload,
    kid_of,
    skeleton_of,
)
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage, window_of
from flask_idempotency.engine.store import Clock, SteadyClock
from flask_idempotency.engine.tasks import LONGEST_LOCK_SECONDS, TaskReport
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores import bucket_edge_ms, bucket_width_ms, microseconds


@valueclass(frozen=True, slots=True)
class KeptJournal:
    """The journal of a record. `steps` is how many entries have effects, as its worker says."""

    entries: Mapping[bytes, Entry]
    fence: int
    write: int
    steps: int


class MemoryRecords:
    """Hold the records, what is known of them, the clock and the lock. Take the lock before you read or write here."""

    def __init__(self, clock: Clock) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.records: dict[StorageKey, Record] = {}
        self.unfinished: dict[StorageKey, Record] = {}
        """Those that are not completed."""
        self.turns: dict[StorageKey, float] = {}
        """When the next turn of a quarantined record for a resolver is. A record without one is due immediately."""
        self.counted: defaultdict[bytes, set[StorageKey]] = defaultdict(set)
        """By tenant: the keys that count in its quota, and some whose life has ended."""
        self.journals: dict[StorageKey, KeptJournal] = {}
        self.data_keys: MemoryDataKeys = MemoryDataKeys(self)
        self._ends: list[tuple[float, int, StorageKey]] = []
        """A heap of the times at which responses and records end, so that a sweep searches no records."""
        self._order = count()
        self._clock = clock
        self._steady_clock = SteadyClock()

    def now(self) -> float:
        now = self._clock()
        return self._steady_clock() if now is None else now

    @contextmanager
    def moment(self) -> Iterator[float]:
        """Hold the lock, and yield the time."""
        with self.lock:
            yield self.now()

    def live(self, key: StorageKey, now: float) -> Record | None:
        """Return the record of this key, or None if there is none or its life has ended."""
        record = self.records.get(key)
        return None if record is None or is_over(record, now) else record

    def as_seen(self, seen: SeenRecord, now: float) -> Record | None:
        """Return the record if it is as an operator or a resolver saw it."""
        record, was = self.live(seen.key, now), seen.record
        if record is None or (record.state, record.token, record.deadline) != (was.state, was.token, was.deadline):
            return None
        return record

    def shown(self, key: StorageKey, record: Record, now: float) -> Record:
        """Return this record as a caller gets it: without a response that has expired, and marked if that was erased."""
        if record.state is State.COMPLETED and record.deadline <= now:
            record = replace(record, payload=skeleton_of(record.payload))
        return self.data_keys.with_erasure(key, replace(record, remaining=record.deadline - now))

    def page(
        self, keys: Iterable[StorageKey], now: float, *, after: bytes, limit: int, tid: bytes | None
    ) -> tuple[list[tuple[StorageKey, Record]], bytes | None]:
        """Return the live records of the first keys after this id, of this tenant if you name one, and the next cursor."""
        ids = heapq.nsmallest(limit + 1, (key for key in keys if key.rid > after), key=lambda key: key.rid)
        held = ((key, self.live(key, now)) for key in ids[:limit] if tid in (None, key.tid))
        found = [(key, self.shown(key, record, now)) for key, record in held if record is not None]
        return found, ids[limit - 1].rid if len(ids) > limit else None

    def put(self, key: StorageKey, record: Record | None) -> None:
        """Change a record here only, so that the quota counts and the recovery index follow every change."""
        before = self.records.pop(key, None)
        if before is not None and before.in_quota:
            self.counted[key.tid].discard(key)
        if record is None:
            self.journals.pop(key, None)
        else:
            self.records[key] = record
            if record.in_quota:
                self.counted[key.tid].add(key)
        if record is None or record.state is State.COMPLETED:
            self.unfinished.pop(key, None)
            # If this key is quarantined again, its first turn for a resolver is due immediately.
            self.turns.pop(key, None)
        else:
            self.unfinished[key] = record

    def quarantine(self, key: StorageKey, record: Record, reason: str) -> str:
        self.put(key, replace(record, state=State.QUARANTINED, reason=reason, remembered_until=None))
        return reason

    def complete(
        self,
        key: StorageKey,
        record: Record,
        payload: StoredPayload,
        now: float,
        *,
        keep: float,
        remember: float | None,
    ) -> None:
        """Complete this record. Raise `DataKeyMissing` as `Store.complete` does."""
        self.data_keys.check(key.tid, record, payload)
        # Never before the claim: if an operator sets the clock back, the record would expire before it began.
        begins = max(now, record.requested_at)
        deadline, until = _end_of(record, begins, keep), None
        if remember is not None and remember > keep:
            until = max(_end_of(record, begins, remember), deadline)
            heapq.heappush(self._ends, (until, next(self._order), key))
        completed = replace(
            record,
            state=State.COMPLETED,
            deadline=deadline,
            completed_at=begins,
            payload=payload,
            reason="",
            remembered_until=until,
        )
        self.put(key, completed)
        self.journals.pop(key, None)
        heapq.heappush(self._ends, (deadline, next(self._order), key))

    def drop(self, horizon: float, limit: int) -> int:
        """Drop up to `limit` responses and records that end by `horizon`. Count those that have changed since, too.

        A record that is remembered for longer only loses its response.
        """
        dropped = 0
        while dropped < limit and self._ends and self._ends[0][0] <= horizon:
            _, _, key = heapq.heappop(self._ends)
            record = self.records.get(key)
            if record is not None and is_over(record, horizon):
                self.put(key, None)
            elif record is not None and _is_expired(record, horizon):
                self.put(key, replace(record, payload=skeleton_of(record.payload)))
            dropped += 1
        return dropped


def is_over(record: Record, now: float) -> bool:
    """Return whether the life of this record has ended, so that its key is free."""
    until = record.deadline if record.remembered_until is None else record.remembered_until
    return record.state is State.COMPLETED and until <= now


def _is_expired(record: Record, now: float) -> bool:
    """Return whether the response of this record has expired."""
    return record.state is State.COMPLETED and record.deadline <= now


def _end_of(record: Record, begins: float, keep: float) -> float:
    """Return when what is kept from `begins` on ends. All that a quota counts together ends together."""
    keep_us = microseconds(keep)
    if not record.in_quota:
        return begins + keep_us / 1_000_000
    return bucket_edge_ms(int(begins * 1_000_000), keep_us, width_ms=bucket_width_ms(keep)) / 1000


class MemoryTaskLog:
    """Implement `capabilities.TaskLog`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._reports: dict[str, tuple[float, str]] = {}
        self._locks: dict[str, tuple[bytes, float]] = {}

    def now(self) -> float:
        with self._shared.moment() as now:
            return now

    def report(self, task: str, report: str) -> None:
        with self._shared.moment() as now:
            self._reports[task] = now, report

    def reports(self) -> Mapping[str, TaskReport]:
        with self._shared.moment() as now:
            return {task: TaskReport(max(now - at, 0.0), report) for task, (at, report) in self._reports.items()}

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        with self._shared.moment() as now:
            holder, until = self._locks.get(task, (token, now))
            if holder != token and now < until <= now + LONGEST_LOCK_SECONDS:
                return False
            self._locks[task] = token, now + lease
            return True

    def unlock(self, task: str, token: bytes) -> None:
        with self._shared.lock:
            if self._locks.get(task, (b"", 0.0))[0] == token:
                del self._locks[task]


class MemoryExpiry:
    """Implement `capabilities.Expiry`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared

    def sweep(self, *, horizon: float, limit: int) -> int:
        with self._shared.moment() as now:
            return self._shared.drop(min(horizon, now), limit)


class MemoryHealth:
    """Implement `capabilities.Health`."""

    def findings(self) -> tuple[Finding, ...]:
        return (
            Finding(
                "persistence",
                Verdict.FAULT,
                "Records are in the memory of one process: they are lost when it ends, and other processes do not see them.",
                "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money.",
            ),
        )


class MemoryLedger:
    """Implement `capabilities.Ledger`. It counts a tenant's records when it is asked, so no count can drift."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._limits: dict[bytes, Quota] = {}
        self._windows: defaultdict[bytes, dict[float, tuple[int, int]]] = defaultdict(dict)
        """By tenant, and by a window's length in seconds: the number of the window, and its new keys."""

    def usage(self, tid: bytes) -> Usage:
        with self._shared.moment() as now:
            return self._usage(tid, now)[0]

    def limits(self, tid: bytes) -> Quota:
        with self._shared.lock:
            return self._limits.get(tid, Quota())

    def limit(self, tid: bytes, quota: Quota) -> None:
        with self._shared.lock:
            self._limits[tid] = quota

    def tenants(self) -> Sequence[bytes]:
        with self._shared.lock:
            return tuple({*self._limits, *self._windows, *self._shared.counted})

    def reconcile(self, tid: bytes) -> Drift:
        return Drift()

    # The store calls the methods below, and holds the lock.

    def check(self, tid: bytes, quota: Quota, now: float) -> OverQuota | None:
        """Return the limit that refuses one more key of this tenant, or None."""
        quota = quota.overlaid(self._limits.get(tid, Quota()))
        used, ends, leases = self._usage(tid, now)
        if quota.records is not None and used.records >= quota.records:
            return OverQuota("records", quota.records, retry_after=min(ends, default=now) - now)
        if quota.bytes is not None and used.bytes >= quota.bytes:
            return OverQuota("bytes", quota.bytes, retry_after=min(ends, default=now) - now)
        if quota.in_flight is not None and used.in_flight >= quota.in_flight:
            return OverQuota("in-flight", quota.in_flight, retry_after=min(leases, default=now) - now)
        if quota.new_keys is not None:
            _, left = window_of(int(now * 1_000_000), quota.new_keys)
            if self._in_window(tid, quota.new_keys, now) >= quota.new_keys.count:
                return OverQuota("new-keys", quota.new_keys.count, left / 1_000_000, quota.new_keys.seconds)
        return None

    def count_new_key(self, tid: bytes, quota: Quota, now: float) -> None:
        """Count one more new key in its window."""
        rate = quota.overlaid(self._limits.get(tid, Quota())).new_keys
        if rate is not None:
            number, _ = window_of(int(now * 1_000_000), rate)
            self._windows[tid][rate.seconds] = number, self._in_window(tid, rate, now) + 1

    def _in_window(self, tid: bytes, rate: NewKeys, now: float) -> int:
        number, seen = self._windows[tid].get(rate.seconds, (-1, 0))
        return seen if number == window_of(int(now * 1_000_000), rate)[0] else 0

    def _usage(self, tid: bytes, now: float) -> tuple[Usage, list[float], list[float]]:
        """Return what the tenant uses, when completed records and responses end, and when running leases do."""
        counted, stored, ends, leases = 0, 0, list[float](), list[float]()
        for key in self._shared.counted[tid]:
            record, journal = self._shared.records[key], self._shared.journals.get(key)
            if journal is not None:
                stored += sum(
                    entry.payload.byte_size for entry in journal.entries.values() if entry.payload is not None
                )
            if record.state is not State.COMPLETED:
                counted += 1
                if record.state is State.PROCESSING and record.deadline > now:
                    leases.append(record.deadline)
                continue
            until = record.deadline if record.remembered_until is None else record.remembered_until
            counted += until > now
            if record.deadline > now and record.payload is not None:
                stored += record.payload.byte_size
            ends += [each for each in (record.deadline, until) if each > now]
        new_keys = max((self._in_window(tid, NewKeys(0, each), now) for each in self._windows[tid]), default=0)
        return Usage(counted, stored, len(leases), new_keys), ends, leases


@dataclass(slots=True)
class _TenantKeys:
    """The data keys of a tenant, by version, and what is left of those that were destroyed."""

    keys: dict[int, DataKey] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    last: int = 0
    destroyed: int = 0
    erased_at: float | None = None


class MemoryDataKeys:
    """Implement `capabilities.DataKeys`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._store = secrets.token_bytes(16)
        self._tenants: defaultdict[bytes, _TenantKeys] = defaultdict(_TenantKeys)

    def read_keys(self, tid: bytes) -> TenantKeys:
        with self._shared.lock:
            tenant = self._tenants[tid]
            return TenantKeys(self._store, tuple(self._listed(tenant)), tenant.last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        with self._shared.lock:
            tenant = self._tenants[tid]
            if store != self._store or tenant.last != after or key.number <= after:
                return False
            tenant.keys[key.number] = key
            tenant.last = key.number
            return True

    def disable(self, tid: bytes, number: int) -> None:
        with self._shared.lock:
            tenant = self._tenants[tid]
            if number in tenant.keys:
                tenant.closed.setdefault(number, self._shared.now())

    def delete(self, tid: bytes, number: int) -> None:
        with self._shared.lock:
            tenant = self._tenants[tid]
            if tenant.closed.pop(number, None) is not None:
                del tenant.keys[number]

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        with self._shared.lock:
            return [(tid, key) for tid, each in self._tenants.items() for key in self._listed(each) if key.kid != kid]

    def sample(self, kid: str, *, limit: int) -> Sequence[tuple[bytes, DataKey]]:
        with self._shared.lock:
            every = ((tid, key) for tid, each in self._tenants.items() for key in self._listed(each) if key.kid == kid)
            return list(islice(every, limit))

    def shred(self, tid: bytes) -> int:
        with self._shared.lock:
            tenant = self._tenants[tid]
            gone = len(tenant.keys)
            tenant.keys.clear()
            tenant.closed.clear()
            tenant.destroyed, tenant.erased_at = tenant.last, self._shared.now()
            return gone

    def count(self) -> Mapping[str, int]:
        with self._shared.lock:
            return Counter(key.kid for tenant in self._tenants.values() for key in tenant.keys.values())

    # The store and `MemoryResponses` call the methods below, and hold the lock.

    def check(self, tid: bytes, record: Record, payload: StoredPayload) -> None:
        """Raise `DataKeyMissing` if the data key of this payload is erased, disabled or unknown."""
        if payload.sealed_by is None or payload.sealed_by.number == 0:
            return
        tenant = self._tenants[tid]
        if tenant.erased_at is not None and record.requested_at <= tenant.erased_at:
            raise DataKeyMissing(erased=True)
        if payload.sealed_by.number not in tenant.keys or payload.sealed_by.number in tenant.closed:
            raise DataKeyMissing(erased=False)

    def erased_since(self, tid: bytes, requested_at: float) -> bool:
        """Return whether the tenant's responses were erased after a request that came then."""
        tenant = self._tenants.get(tid)
        return tenant is not None and tenant.erased_at is not None and requested_at <= tenant.erased_at

    def with_erasure(self, key: StorageKey, record: Record) -> Record:
        """Return this record, marked as erased if its tenant's data keys were destroyed since it was sealed."""
        tenant = self._tenants.get(key.tid)
        if record.payload is None or tenant is None or tenant.erased_at is None:
            return record
        by = record.payload.sealed_by
        erased = record.requested_at <= tenant.erased_at if by is None else by.number <= tenant.destroyed
        return replace(record, erased=True) if erased else record

    def _listed(self, tenant: _TenantKeys) -> Iterator[DataKey]:
        now = self._shared.now()
        for number, key in tenant.keys.items():
            closed = tenant.closed.get(number)
            yield key if closed is None else replace(key, closed_for=now - closed)


class MemoryResponses:
    """Implement `capabilities.Responses`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        with self._shared.moment() as now:
            found, following = self._shared.page(self._shared.records, now, after=after, limit=limit, tid=tid)
            wanted = (
                Answer(key, record)
                for key, record in found
                if record.state is State.COMPLETED and record.remaining > 0
                if other_than is None or kid_of(record.payload) != other_than
            )
            return Page(tuple(wanted), following)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            if record is None or record.state is not State.COMPLETED or record.deadline <= now or record.payload != old:
                return False
            self._shared.data_keys.check(key.tid, record, new)
            self._shared.records[key] = replace(record, payload=new)
            return True

    def count(self) -> Mapping[str, int]:
        with self._shared.lock:
            completed = (record for record in self._shared.records.values() if record.state is State.COMPLETED)
            payloads = (record.payload for record in completed)
            return Counter(kid_of(each) for each in payloads if each is None or each.sealed_by != ERASED)


class MemoryRecovery:
    """Implement `capabilities.Recovery`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        with self._shared.moment() as now:
            found, following = self._shared.page(self._shared.unfinished, now, after=after, limit=limit, tid=None)
            stale = (SeenRecord(key, record) for key, record in found if _is_stale(record, min(horizon, now)))
            return RecordPage(tuple(stale), following)

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        with self._shared.moment() as now:
            record = self._shared.as_seen(seen, now)
            if record is None or not _is_stale(record, min(horizon, now)) or record.on_expiry is OnExpiry.TAKEOVER:
                return False
            self._shared.quarantine(seen.key, record, LAPSED)
            return True

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        with self._shared.moment() as now:
            turns, upto = self._shared.turns, min(horizon, now)
            waiting = [
                (turns.get(key, record.deadline), key, record)
                for key, record in self._shared.unfinished.items()
                if record.state is State.QUARANTINED and (owner is None or record.token.startswith(owner))
                if turns.get(key, -inf) <= upto
            ]
            found = list[SeenRecord]()
            for turn, key, record in heapq.nsmallest(limit, waiting, key=lambda each: each[0]):
                found.append(
                    SeenRecord(key, self._shared.shown(key, record, now), returned_before=turn > record.deadline)
                )
                turns[key] = upto + min(max(now - record.deadline, least), most)
            return found

    def resolve(
        self,
        seen: SeenRecord,
        *,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None = None,
    ) -> bool:
        with self._shared.moment() as now:
            record = self._shared.live(seen.key, now)
            if record is not None and record.state is State.COMPLETED and record.token == token:
                return True
            record = self._shared.as_seen(seen, now)
            if record is None or record.state is not State.QUARANTINED:
                return False
            self._shared.complete(seen.key, replace(record, token=token), payload, now, keep=keep, remember=remember)
            return True

    def force_release(self, seen: SeenRecord) -> bool:
        with self._shared.moment() as now:
            record = self._shared.as_seen(seen, now)
            if record is None or record.on_expiry is not seen.record.on_expiry:
                return False
            self._shared.put(seen.key, None)
            return True

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        with self._shared.moment() as now:
            records = self._shared.records if state is State.COMPLETED else self._shared.unfinished
            found, following = self._shared.page(records, now, after=after, limit=limit, tid=tid)
            return RecordPage(
                tuple(SeenRecord(key, record) for key, record in found if record.state is state), following
            )

    def counts(self) -> UnfinishedCounts:
        with self._shared.moment() as now:
            records = self._shared.unfinished.values()
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

    def about_completed(self) -> int:
        with self._shared.lock:
            return len(self._shared.records) - len(self._shared.unfinished)


def _is_stale(record: Record, now: float) -> bool:
    return record.state is State.PROCESSING and record.deadline <= now
