"""Records in this process's memory: for tests, and for applications that are one process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    CORRUPT,
    Claimed,
    ClaimRequest,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    Record,
    Replayed,
    State,
    StoredPayload,
    Unknown,
)
from flask_idempotency.engine.quota import Quota, bucket_edge_ms, bucket_width_ms
from flask_idempotency.engine.recovery import LAPSED
from flask_idempotency.engine.store import Clock, StoreOutcome, store_time
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.memory.admin import (
    MemoryDataKeys,
    MemoryExpiry,
    MemoryHealth,
    MemoryLedger,
    MemoryRecords,
    MemoryRecovery,
    MemoryResponses,
    MemoryTaskLog,
)

# Two would do, one for the record that a claim adds and one to catch up; eight catches up sooner.
DROPPED_PER_CLAIM = 8

GIVEN_UP_SECONDS = 60.0
"""For how long nothing is granted to a token that was released."""


class MemoryStore:
    """Keeps every promise of the contract for the threads of one process, and forgets everything with it.

    Two processes share nothing: each would run the same payment once.
    """

    def __init__(self, clock: Clock = store_time) -> None:
        self._room = MemoryRecords(clock)
        self.ledger = MemoryLedger(self._room)
        self.data_keys = MemoryDataKeys(self._room)
        self.responses = MemoryResponses(self._room, self.data_keys)
        self.recovery = MemoryRecovery(self._room, put=self._put, complete=self._complete, told=self._told)
        self.expiry = MemoryExpiry(self._room, put=self._put)
        self.task_log = MemoryTaskLog(self._room)
        self.health = MemoryHealth()
        self._last_fence = 0
        self._given_up = OrderedDict[bytes, float]()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._room.lock = threading.Lock()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        seconds = _seconds(lease)
        with self._room.lock:
            now = self._room.now()
            # A few, so that a store in use does not grow for ever and no claim pays for all.
            self.expiry.drop(now, DROPPED_PER_CLAIM)
            record = self._room.live(request.key, now)
            if record is None:
                self._refuse_given_up(token)
                return self._admit(request, token, now, seconds, quota)
            if record.fingerprint != request.fingerprint:
                return Mismatched(first_seen=record.requested_at)
            if record.state is State.COMPLETED:
                return Replayed(self._told(request.key, record, now))
            if record.state is State.QUARANTINED:
                return Unknown(record.reason)
            if record.token == token:
                return Claimed(_grant_of(record, now))
            if record.deadline > now:
                return InFlight(retry_after=record.deadline - now)
            if record.on_expiry is OnExpiry.TAKEOVER:
                self._refuse_given_up(token)
                return self._grant(request, token, now, seconds, before=record, counted=record.in_quota)
            return Unknown(self._quarantine(request.key, record, LAPSED))

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        seconds = _seconds(lease)
        with self._room.lock:
            now = self._room.now()
            record = self._owned(key, token, now)
            if record.state is State.PROCESSING or record.reason == LAPSED:
                self._put(key, replace(record, deadline=max(record.deadline, now + seconds)))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        with self._room.lock:
            record = self._unsettled(key, token, self._room.now())
            if record.state is State.PROCESSING:
                self._put(key, replace(record, on_expiry=OnExpiry.QUARANTINE))

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        microseconds(keep)
        with self._room.lock:
            now = self._room.now()
            record = self._owned(key, token, now)
            if record.state is not State.COMPLETED:
                self._complete(key, record, payload, keep, now)

    def release(self, key: StorageKey, token: bytes) -> None:
        with self._room.lock:
            now = self._room.now()
            if self._room.live(key, now) is not None:
                self._unsettled(key, token, now)
                self._put(key, None)
            self._give_up(token, now)

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        with self._room.lock:
            record = self._unsettled(key, token, self._room.now())
            if record.state is State.PROCESSING:
                self._quarantine(key, record, reason)

    def read(self, key: StorageKey) -> Record | None:
        with self._room.lock:
            now = self._room.now()
            record = self._room.live(key, now)
            return None if record is None else self._told(key, record, now)

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        with self._room.lock:
            record = self._room.live(key, self._room.now())
            if record is not None and record.state is State.COMPLETED and record.payload == payload:
                self._quarantine(key, record, CORRUPT)

    def _complete(self, key: StorageKey, record: Record, payload: StoredPayload, keep: float, now: float) -> None:
        self.data_keys.check(key.tid, record, payload)
        seconds = _seconds(keep)
        # By a clock that was set back meanwhile it would end before it began.
        begins = max(now, record.requested_at)
        deadline = _edge(begins, seconds) if record.in_quota else begins + seconds
        completed = replace(
            record, state=State.COMPLETED, deadline=deadline, completed_at=begins, payload=payload, reason=""
        )
        self._put(key, completed)
        self.expiry.entered(key, deadline)

    def _refuse_given_up(self, token: bytes) -> None:
        if token in self._given_up:
            raise StoreUnavailable("this claim came after it was given up")

    def _give_up(self, token: bytes, now: float) -> None:
        self._given_up[token] = now
        while next(iter(self._given_up.values())) < now - GIVEN_UP_SECONDS:
            self._given_up.popitem(last=False)

    def _owned(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._room.live(key, now)
        if record is None or record.token != token:
            raise LeaseLost("the record belongs to somebody else, or is gone")
        return record

    def _unsettled(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._owned(key, token, now)
        if record.payload is not None:  # also one that was condemned: the work was done
            raise LeaseLost("the record is completed")
        return record

    def _admit(
        self, request: ClaimRequest, token: bytes, now: float, lease: float, quota: Quota | None
    ) -> StoreOutcome:
        if quota is None:
            return self._grant(request, token, now, lease)
        refused = self.ledger.refuses(request.key.tid, quota, now)
        if refused is not None:
            return refused
        self.ledger.admitted(request.key.tid, quota, now)
        return self._grant(request, token, now, lease, counted=True)

    def _grant(
        self,
        request: ClaimRequest,
        token: bytes,
        now: float,
        lease: float,
        *,
        before: Record | None = None,
        counted: bool = False,
    ) -> Claimed[Grant]:
        # From the clock and not from one: a store that was made anew must not hand out an old fence again.
        self._last_fence = max(self._last_fence + 1, int(now * 1_000_000))
        record = Record(
            state=State.PROCESSING,
            token=token,
            fence=self._last_fence,
            attempt=1 if before is None else before.attempt + 1,
            fingerprint=request.fingerprint,
            on_expiry=request.on_expiry,
            info=request.info,
            requested_at=now if before is None else before.requested_at,
            deadline=now + lease,
            remaining=lease,
            in_quota=counted,
        )
        self._put(request.key, record)
        return Claimed(_grant_of(record, now))

    def _quarantine(self, key: StorageKey, record: Record, reason: str) -> str:
        self._put(key, replace(record, state=State.QUARANTINED, reason=reason))
        return reason

    def _put(self, key: StorageKey, record: Record | None) -> None:
        """The one place where a record changes, so that neither the ledger nor who looks after it can miss it."""
        before = self._room.records.pop(key, None)
        if before is not None and before.in_quota:
            self.ledger.left(key, before)
        if record is not None:
            self._room.records[key] = record
            if record.in_quota:
                self.ledger.entered(key, record)
        self.recovery.moved(key, record)

    def _told(self, key: StorageKey, record: Record, now: float) -> Record:
        return self.data_keys.told(key, replace(record, remaining=record.deadline - now))


def _seconds(duration: float) -> float:
    return microseconds(duration) / 1_000_000


def _edge(now: float, keep: float) -> float:
    width = bucket_width_ms(keep)
    return bucket_edge_ms(int(now * 1_000_000), round(keep * 1_000_000), width_ms=width) / 1000


def _grant_of(record: Record, now: float) -> Grant:
    return Grant(record.token, record.fence, record.attempt, lease=max(record.deadline - now, 0.0))
