"""Records in this process's memory: for tests, and for applications that are one process."""

from __future__ import annotations

import heapq
import os
import threading
from dataclasses import replace
from itertools import count
from weakref import WeakSet

from flask_idempotency.engine.clock import Clock, SteadyClock, store_time
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.outcome import Claimed, Grant, InFlight, Mismatched, Replayed, Unknown
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.record import OnLapse, Payload, Record, State
from flask_idempotency.engine.request import ClaimRequest
from flask_idempotency.stores.durations import microseconds

# Two would do, one for the record that a claim adds and one to catch up; eight catches up sooner.
DROPPED_PER_CLAIM = 8


class MemoryStore:
    """Keeps every promise of the contract for the threads of one process, and forgets everything with it.

    Two processes share nothing: each would run the same payment once.
    """

    def __init__(self, clock: Clock = store_time) -> None:
        self._clock = clock
        self._own_time = SteadyClock()
        self._lock = threading.Lock()
        self._records: dict[StorageKey, Record] = {}
        self._expiries: list[tuple[float, int, StorageKey]] = []
        self._order = count()
        self._last_fence = 0
        _stores.add(self)

    def after_fork(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._lock = threading.Lock()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float) -> StoreOutcome:
        seconds = _seconds(lease)
        with self._lock:
            now = self._now()
            self._drop_expired(now)
            record = self._live(request.key, now)
            if record is None:
                return self._grant(request, token, now, seconds, attempt=1, requested_at=now)
            if record.fingerprint != request.fingerprint:
                return Mismatched(first_seen=record.requested_at)
            if record.state is State.COMPLETED:
                return Replayed(_as_of(record, now))
            if record.state is State.QUARANTINED:
                return Unknown(record.reason)
            if record.token == token:
                return Claimed(_grant_of(record, now))
            if record.deadline > now:
                return InFlight(retry_after=record.deadline - now)
            if record.on_lapse is OnLapse.TAKEOVER:
                first, attempt = record.requested_at, record.attempt + 1
                return self._grant(request, token, now, seconds, attempt=attempt, requested_at=first)
            return Unknown(self._quarantine(request.key, record, "lease-expired"))

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        seconds = _seconds(lease)
        with self._lock:
            now = self._now()
            record = self._owned(key, token, now)
            if record.state is State.PROCESSING:
                self._records[key] = replace(record, deadline=max(record.deadline, now + seconds))

    def mark(self, key: StorageKey, token: bytes) -> None:
        with self._lock:
            record = self._unsettled(key, token, self._now())
            if record.state is State.PROCESSING:
                self._records[key] = replace(record, on_lapse=OnLapse.QUARANTINE)

    def complete(self, key: StorageKey, token: bytes, payload: Payload, *, keep: float) -> None:
        seconds = _seconds(keep)
        with self._lock:
            now = self._now()
            record = self._owned(key, token, now)
            if record.state is State.COMPLETED:
                return
            deadline = now + seconds
            self._records[key] = replace(
                record, state=State.COMPLETED, deadline=deadline, completed_at=now, payload=payload, reason=""
            )
            heapq.heappush(self._expiries, (deadline, next(self._order), key))

    def release(self, key: StorageKey, token: bytes) -> None:
        with self._lock:
            now = self._now()
            if self._live(key, now) is not None:
                self._unsettled(key, token, now)
                del self._records[key]

    def hold(self, key: StorageKey, token: bytes, reason: str) -> None:
        with self._lock:
            record = self._unsettled(key, token, self._now())
            if record.state is State.PROCESSING:
                self._quarantine(key, record, reason)

    def read(self, key: StorageKey) -> Record | None:
        with self._lock:
            now = self._now()
            record = self._live(key, now)
            return None if record is None else _as_of(record, now)

    def _now(self) -> float:
        told = self._clock()
        return self._own_time() if told is None else told

    def _live(self, key: StorageKey, now: float) -> Record | None:
        record = self._records.get(key)
        if record is not None and record.state is State.COMPLETED and record.deadline <= now:
            return None
        return record

    def _owned(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._live(key, now)
        if record is None or record.token != token:
            raise LeaseLost("the record belongs to somebody else, or is gone")
        return record

    def _unsettled(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._owned(key, token, now)
        if record.state is State.COMPLETED:
            raise LeaseLost("the record is completed")
        return record

    def _grant(
        self, request: ClaimRequest, token: bytes, now: float, lease: float, *, attempt: int, requested_at: float
    ) -> Claimed[Grant]:
        # From the clock and not from one: a store that was made anew must not hand out an old fence again.
        self._last_fence = max(self._last_fence + 1, int(now * 1_000_000))
        record = Record(
            state=State.PROCESSING,
            token=token,
            fence=self._last_fence,
            attempt=attempt,
            fingerprint=request.fingerprint,
            on_lapse=request.on_lapse,
            about=request.about,
            requested_at=requested_at,
            deadline=now + lease,
            remaining=lease,
        )
        self._records[request.key] = record
        return Claimed(_grant_of(record, now))

    def _quarantine(self, key: StorageKey, record: Record, reason: str) -> str:
        self._records[key] = replace(record, state=State.QUARANTINED, reason=reason)
        return reason

    def _drop_expired(self, now: float) -> None:
        """Forget a few expired records, so that a store in use does not grow for ever and no claim pays for all."""
        for _ in range(DROPPED_PER_CLAIM):
            if not self._expiries or self._expiries[0][0] > now:
                return
            _, _, key = heapq.heappop(self._expiries)
            if key in self._records and self._live(key, now) is None:
                del self._records[key]


_stores: WeakSet[MemoryStore] = WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store.after_fork()


# Once and not per store: what is registered here stays for as long as the process does.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _seconds(duration: float) -> float:
    return microseconds(duration) / 1_000_000


def _as_of(record: Record, now: float) -> Record:
    return replace(record, remaining=record.deadline - now)


def _grant_of(record: Record, now: float) -> Grant:
    return Grant(record.token, record.fence, record.attempt, lease=max(record.deadline - now, 0.0))
