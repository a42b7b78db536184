"""What the janitor, the command line and `doctor` call on the memory store: one class for each capability.

All classes share one `MemoryRecords` with the store: the records, the clock and the lock.
"""

from __future__ import annotations

import heapq
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import LAPSED
from flask_idempotency.engine.model import (
    ERASED,
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


class MemoryRecords:
    """Hold the records, the clock and the lock. Take the lock before you read or write here."""

    def __init__(self, clock: Clock) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.records: dict[StorageKey, Record] = {}
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


def page_of(keys: Iterable[StorageKey], after: bytes, limit: int) -> tuple[list[StorageKey], bytes | None]:
    """Return the first keys after this id, by their ids, and where the next page begins. None: this is the last."""
    page = heapq.nsmallest(limit + 1, (key for key in keys if key.rid > after), key=lambda key: key.rid)
    return page[:limit], page[limit - 1].rid if len(page) > limit else None


def as_seen(record: Record, seen: Record) -> bool:
    """Return whether the record is as an operator or a resolver saw it."""
    return (record.state, record.token, record.deadline) == (seen.state, seen.token, seen.deadline)


def is_over(record: Record, now: float) -> bool:
    """Return whether the life of this record has ended, so that its key is free."""
    until = record.deadline if record.remembered_until is None else record.remembered_until
    return record.state is State.COMPLETED and until <= now


class MemoryTaskLog:
    """Implement `capabilities.TaskLog`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._reports: dict[str, tuple[float, str]] = {}
        self._locks: dict[str, tuple[bytes, float]] = {}

    def now(self) -> float:
        with self._shared.lock:
            return self._shared.now()

    def report(self, task: str, report: str) -> None:
        with self._shared.lock:
            self._reports[task] = self._shared.now(), report

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
    """Implement `capabilities.Expiry` with a heap of deadlines, so that a sweep searches no records."""

    def __init__(self, shared: MemoryRecords, *, put: Callable[[StorageKey, Record | None], None]) -> None:
        self._shared = shared
        self._put = put
        self._ends: list[tuple[float, int, StorageKey]] = []
        self._order = count()

    def sweep(self, *, horizon: float, limit: int) -> int:
        with self._shared.lock:
            return self.drop(min(horizon, self._shared.now()), limit)

    # The store calls the methods below, and holds the lock.

    def completed(self, key: StorageKey, deadline: float) -> None:
        heapq.heappush(self._ends, (deadline, next(self._order), key))

    def drop(self, horizon: float, limit: int) -> int:
        """Drop up to `limit` heap entries that end by `horizon`, and their records unless those have changed.

        A record that is remembered for longer only loses its response.
        """
        dropped = 0
        while dropped < limit and self._ends and self._ends[0][0] <= horizon:
            _, _, key = heapq.heappop(self._ends)
            record = self._shared.records.get(key)
            if record is not None and is_over(record, horizon):
                self._put(key, None)
            elif record is not None and record.state is State.COMPLETED and record.deadline <= horizon:
                self._put(key, replace(record, payload=skeleton_of(record.payload)))
            dropped += 1
        return dropped


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


@dataclass(slots=True)
class _TenantCounts:
    """What one tenant has in its quota."""

    keys: set[StorageKey] = field(default_factory=set)
    """Of the records that count, and of some whose life has ended."""
    windows: dict[float, tuple[int, int]] = field(default_factory=dict)
    """By a window's length in seconds: the number of the window, and its new keys."""
    limits: Quota = field(default_factory=Quota)


class MemoryLedger:
    """Implement `capabilities.Ledger`. It counts a tenant's records when it is asked, so no count can drift."""

    def __init__(self, shared: MemoryRecords, *, journal_bytes: Callable[[bytes], int]) -> None:
        self._shared = shared
        self._journal_bytes = journal_bytes
        self._tenants: dict[bytes, _TenantCounts] = {}

    def usage(self, tid: bytes) -> Usage:
        with self._shared.moment() as now:
            return self._usage(tid, now)[0]

    def limits(self, tid: bytes) -> Quota:
        with self._shared.lock:
            return self._of(tid).limits

    def limit(self, tid: bytes, quota: Quota) -> None:
        with self._shared.lock:
            self._of(tid).limits = quota

    def tenants(self) -> Sequence[bytes]:
        with self._shared.lock:
            return tuple(self._tenants)

    def reconcile(self, tid: bytes) -> Drift:
        return Drift()

    # The store calls the methods below, and holds the lock.

    def check(self, tid: bytes, quota: Quota, now: float) -> OverQuota | None:
        """Return the limit that refuses one more key of this tenant, or None."""
        quota = quota.overlaid(self._of(tid).limits)
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
        tenant = self._of(tid)
        rate = quota.overlaid(tenant.limits).new_keys
        if rate is not None:
            number, _ = window_of(int(now * 1_000_000), rate)
            tenant.windows[rate.seconds] = number, self._in_window(tid, rate, now) + 1

    def changed(self, key: StorageKey, record: Record | None) -> None:
        """Note whether the record of this key counts."""
        keys = self._of(key.tid).keys
        if record is not None and record.in_quota:
            keys.add(key)
        else:
            keys.discard(key)

    def _of(self, tid: bytes) -> _TenantCounts:
        return self._tenants.setdefault(tid, _TenantCounts())

    def _in_window(self, tid: bytes, rate: NewKeys, now: float) -> int:
        number, seen = self._of(tid).windows.get(rate.seconds, (-1, 0))
        return seen if number == window_of(int(now * 1_000_000), rate)[0] else 0

    def _usage(self, tid: bytes, now: float) -> tuple[Usage, list[float], list[float]]:
        """Return what the tenant uses, when completed records and responses end, and when running leases do."""
        tenant, stored = self._of(tid), self._journal_bytes(tid)
        counted, ends, leases = 0, list[float](), list[float]()
        for record in map(self._shared.records.__getitem__, tenant.keys):
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
        new_keys = max((self._in_window(tid, NewKeys(0, seconds), now) for seconds in tenant.windows), default=0)
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
        self._tenants: dict[bytes, _TenantKeys] = {}

    def read_keys(self, tid: bytes) -> TenantKeys:
        with self._shared.lock:
            tenant = self._of(tid)
            return TenantKeys(self._store, tuple(self._listed(tenant)), tenant.last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        with self._shared.lock:
            tenant = self._of(tid)
            if store != self._store or tenant.last != after or key.number <= after:
                return False
            tenant.keys[key.number] = key
            tenant.last = key.number
            return True

    def disable(self, tid: bytes, number: int) -> None:
        with self._shared.lock:
            tenant = self._of(tid)
            if number in tenant.keys:
                tenant.closed.setdefault(number, self._shared.now())

    def delete(self, tid: bytes, number: int) -> None:
        with self._shared.lock:
            tenant = self._of(tid)
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
            tenant = self._of(tid)
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
        tenant = self._of(tid)
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

    def _of(self, tid: bytes) -> _TenantKeys:
        return self._tenants.setdefault(tid, _TenantKeys())


class MemoryResponses:
    """Implement `capabilities.Responses`."""

    def __init__(self, shared: MemoryRecords, data_keys: MemoryDataKeys) -> None:
        self._shared = shared
        self._data_keys = data_keys

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        with self._shared.moment() as now:
            keys, following = page_of(self._shared.records, after, limit)
            live = [(key, self._shared.live(key, now)) for key in keys]
            found = [
                Answer(key, self._data_keys.with_erasure(key, record))
                for key, record in live
                if record is not None and _has_response(record, now) and tid in (None, key.tid)
            ]
            wanted = tuple(
                answer for answer in found if other_than is None or kid_of(answer.record.payload) != other_than
            )
            return Page(wanted, following)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        with self._shared.lock:
            now = self._shared.now()
            record = self._shared.live(key, now)
            if record is None or not _has_response(record, now) or record.payload != old:
                return False
            self._data_keys.check(key.tid, record, new)
            self._shared.records[key] = replace(record, payload=new)
            return True

    def count(self) -> Mapping[str, int]:
        with self._shared.lock:
            completed = (record for record in self._shared.records.values() if record.state is State.COMPLETED)
            payloads = (record.payload for record in completed)
            return Counter(kid_of(each) for each in payloads if each is None or each.sealed_by != ERASED)


def _has_response(record: Record, now: float) -> bool:
    """Return whether a retry gets the response of this record."""
    return record.state is State.COMPLETED and record.deadline > now


class MemoryRecovery:
    """Implement `capabilities.Recovery`. The store passes its own `put` and `complete`, which also update the quota."""

    def __init__(
        self,
        shared: MemoryRecords,
        *,
        put: Callable[[StorageKey, Record | None], None],
        complete: Callable[[StorageKey, Record, StoredPayload, float, float | None, float], None],
        with_erasure: Callable[[StorageKey, Record, float], Record],
    ) -> None:
        self._shared = shared
        self._put = put
        self._complete = complete
        self._with_erasure = with_erasure
        self._not_completed: dict[StorageKey, Record] = {}
        self._turns: dict[StorageKey, float] = {}

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        return self._page(self._not_completed, lambda record, now: _is_stale(record, min(horizon, now)), after, limit)

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        with self._shared.moment() as now:
            record = self._as_seen(seen, now)
            if record is None or not _is_stale(record, min(horizon, now)) or record.on_expiry is OnExpiry.TAKEOVER:
                return False
            self._put(seen.key, replace(record, state=State.QUARANTINED, reason=LAPSED))
            return True

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        with self._shared.moment() as now:
            quarantined = {
                key: record
                for key, record in self._not_completed.items()
                if record.state is State.QUARANTINED and (owner is None or record.token.startswith(owner))
            }
            waiting = sorted(quarantined, key=lambda key: self._turns.get(key, quarantined[key].deadline))
            come = (key for key in waiting if self._turns.get(key, -inf) <= min(horizon, now))
            taken = list(islice(come, limit))
            found = [
                SeenRecord(
                    key,
                    self._with_erasure(key, record, now),
                    returned_before=self._turns.get(key, -inf) > record.deadline,
                )
                for key, record in ((key, quarantined[key]) for key in taken)
            ]
            for key in taken:
                self._turns[key] = min(horizon, now) + min(max(now - quarantined[key].deadline, least), most)
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
            record = self._as_seen(seen, now)
            if record is None or record.state is not State.QUARANTINED:
                return False
            self._complete(seen.key, replace(record, token=token), payload, keep, remember, now)
            return True

    def force_release(self, seen: SeenRecord) -> bool:
        with self._shared.lock:
            record = self._as_seen(seen, self._shared.now())
            if record is None or record.on_expiry is not seen.record.on_expiry:
                return False
            self._put(seen.key, None)
            return True

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        records = self._shared.records if state is State.COMPLETED else self._not_completed
        return self._page(
            records, lambda record, now: record.state is state and not is_over(record, now), after, limit, tid=tid
        )

    def counts(self) -> UnfinishedCounts:
        with self._shared.moment() as now:
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

    def about_completed(self) -> int:
        with self._shared.lock:
            return len(self._shared.records) - len(self._not_completed)

    def _page(
        self,
        records: Mapping[StorageKey, Record],
        wanted: Callable[[Record, float], bool],
        after: bytes,
        limit: int,
        *,
        tid: bytes | None = None,
    ) -> RecordPage:
        with self._shared.moment() as now:
            keys, following = page_of(records, after, limit)
            held = ((key, records[key]) for key in keys if tid in (None, key.tid))
            found = tuple(
                SeenRecord(key, self._with_erasure(key, record, now)) for key, record in held if wanted(record, now)
            )
            return RecordPage(found, following)

    def _as_seen(self, seen: SeenRecord, now: float) -> Record | None:
        record = self._shared.live(seen.key, now)
        return record if record is not None and as_seen(record, seen.record) else None

    # The store calls the method below, and holds the lock.

    def changed(self, key: StorageKey, record: Record | None) -> None:
        if record is None or record.state is State.COMPLETED:
            self._not_completed.pop(key, None)
            # If this key is quarantined again, its first turn for a resolver is due immediately.
            self._turns.pop(key, None)
        else:
            self._not_completed[key] = record


def _is_stale(record: Record, now: float) -> bool:
    return record.state is State.PROCESSING and record.deadline <= now
