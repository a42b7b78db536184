"""The store of one process: records in memory, for tests and for applications with a single process.

It keeps the contract of every other store, with one lock around each call. Two processes share nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey, paused_token
from flask_idempotency.engine.model import (
    CALLER_UNKNOWN,
    CORRUPT,
    IN_DOUBT,
    LAPSED,
    VOID,
    VOIDED,
    ClaimRequest,
    Expired,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    OtherCaller,
    OverQuota,
    Record,
    State,
    StoredPayload,
    Unknown,
    Voided,
)
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Clock, StoreOutcome, store_time
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.memory.activity import MemoryActivity, MemoryAuditTrail, MemoryObservations
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
from flask_idempotency.stores.memory.journals import MemoryJournals, paused

DROPPED_PER_CLAIM = 8
"""Expired records that each claim may drop. Two would suffice, one for the new record and one to catch up."""

CANCELLED_SECONDS = 60.0
"""The store refuses a released token for this long, because its claim may still arrive."""


class MemoryStore:
    """Keep records for the threads of one process, until the process ends.

    Do not use it with several workers: each of them would run the same payment once.
    """

    process_local = True
    remembers = True

    def __init__(self, clock: Clock = store_time) -> None:
        self._shared = MemoryRecords(clock)
        self.data_keys: MemoryDataKeys = self._shared.data_keys
        self.journals: MemoryJournals = MemoryJournals(self._shared, complete=self.complete)
        self.ledger: MemoryLedger = MemoryLedger(self._shared)
        self.responses: MemoryResponses = MemoryResponses(self._shared)
        self.recovery: MemoryRecovery = MemoryRecovery(self._shared)
        self.expiry: MemoryExpiry = MemoryExpiry(self._shared)
        self.task_log: MemoryTaskLog = MemoryTaskLog(self._shared)
        self.health: MemoryHealth = MemoryHealth()
        self.activity: MemoryActivity = MemoryActivity(self._shared)
        self.observations: MemoryObservations = MemoryObservations(self._shared)
        self.audit: MemoryAuditTrail = MemoryAuditTrail(self._shared)
        self._last_fence = 0
        self._cancelled = OrderedDict[bytes, float]()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        """Replace the lock in a forked child: the thread that held it exists only in the parent."""
        self._shared.lock = threading.Lock()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        seconds = _seconds(lease)
        with self._shared.lock:
            now = self._shared.now()
            # Drop a few, so that the store does not grow without end and no single claim pays for all.
            self._shared.drop(now, DROPPED_PER_CLAIM)
            record = self._shared.live(request.key, now)
            if record is None:
                self._refuse_cancelled(token)
                return self._claim_new(request, token, now, seconds, quota)
            shown = request.callers is None or request.callers.show(record.info)
            if shown is False:
                return OtherCaller(first_seen=record.requested_at)
            if record.fingerprint == VOIDED:
                return Voided(first_seen=record.requested_at)
            if record.fingerprint != request.fingerprint:
                return Mismatched(first_seen=record.requested_at)
            if record.state is State.COMPLETED:
                if record.deadline <= now:
                    return Expired(first_seen=record.requested_at)
                return self._shared.shown(request.key, record, now)
            if record.state is State.QUARANTINED:
                return Unknown(record.reason)
            if record.token == token:
                return _grant_of(record, now)
            if record.deadline > now:
                return InFlight(retry_after=record.deadline - now)
            if shown is None:
                return Unknown(CALLER_UNKNOWN)
            if record.on_expiry is OnExpiry.TAKEOVER:
                self._refuse_cancelled(token)
                return self._grant(request, token, now, seconds, before=record, counted=record.in_quota)
            return Unknown(self._shared.quarantine(request.key, record, LAPSED))

    def void(
        self, request: ClaimRequest, *, token: bytes, keep: float, quota: Quota | None = None
    ) -> Voided | Mismatched | OtherCaller | OverQuota:
        seconds = _seconds(keep)
        with self._shared.moment() as now:
            record = self._shared.live(request.key, now)
            if record is None:
                outcome = self._claim_new(request, token, now, seconds, quota)
                if isinstance(outcome, OverQuota):
                    return outcome
                record = self._shared.records[request.key]
                self._shared.complete(request.key, record, VOID, now, keep=keep, remember=None)
            elif request.callers is not None and request.callers.show(record.info) is False:
                return OtherCaller(first_seen=record.requested_at)
            seen = record.requested_at
            return Voided(seen) if record.fingerprint == VOIDED else Mismatched(seen)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        seconds = _seconds(lease)
        with self._shared.moment() as now:
            record = self._owned(key, token, now)
            if record.state is State.PROCESSING or record.reason == LAPSED:
                self._shared.put(key, replace(record, deadline=max(record.deadline, now + seconds)))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        with self._shared.moment() as now:
            record = self._unsettled(key, token, now)
            if record.state is State.PROCESSING:
                self._shared.put(key, replace(record, on_expiry=OnExpiry.QUARANTINE))

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        microseconds(keep)
        with self._shared.moment() as now:
            record = self._owned(key, token, now)
            if record.state is not State.COMPLETED:
                self._shared.complete(key, record, payload, now, keep=keep, remember=remember)

    def release(self, key: StorageKey, token: bytes) -> State | None:
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            state: State | None = None
            if record is not None and record.token == paused_token(token):
                state = State.PROCESSING  # this call has paused it before
            elif record is not None:
                self._unsettled(key, token, now)
                journal = self._shared.journals.get(key)
                if journal is None or journal.steps == 0:
                    self._shared.put(key, None)
                elif record.on_expiry is OnExpiry.QUARANTINE:
                    if record.state is State.PROCESSING:
                        self._shared.quarantine(key, record, IN_DOUBT)
                    return State.QUARANTINED
                else:
                    self._shared.put(key, paused(record, paused_token(token), now))
                    state = State.PROCESSING
            self._cancelled[token] = now
            while next(iter(self._cancelled.values())) < now - CANCELLED_SECONDS:
                self._cancelled.popitem(last=False)
            return state

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        with self._shared.moment() as now:
            record = self._unsettled(key, token, now)
            if record.state is State.PROCESSING:
                self._shared.quarantine(key, record, reason)

    def read(self, key: StorageKey) -> Record | None:
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            return None if record is None else self._shared.shown(key, record, now)

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            answered = record is not None and record.state is State.COMPLETED and record.payload == payload
            if record is not None and answered and record.deadline > now:
                self._shared.quarantine(key, record, CORRUPT)

    def _refuse_cancelled(self, token: bytes) -> None:
        if token in self._cancelled:
            raise StoreUnavailable("the claim was cancelled before it reached the store")

    def _owned(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._shared.live(key, now)
        if record is None or record.token != token:
            raise LeaseLost("the record has another token, or is gone")
        return record

    def _unsettled(self, key: StorageKey, token: bytes, now: float) -> Record:
        record = self._owned(key, token, now)
        if record.payload is not None:  # A quarantined record may have one too: its work is done.
            raise LeaseLost("the record is completed")
        return record

    def _claim_new(
        self, request: ClaimRequest, token: bytes, now: float, lease: float, quota: Quota | None
    ) -> Grant | OverQuota:
        if quota is None:
            return self._grant(request, token, now, lease)
        refused = self.ledger.check(request.key.tid, quota, now)
        if refused is not None:
            return refused
        self.ledger.count_new_key(request.key.tid, quota, now)
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
    ) -> Grant:
        # Start at the clock, not at 1: the store of a restarted process must not issue an old fence again.
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
        if before is None:
            self._shared.journals.pop(request.key, None)
        self._shared.put(request.key, record)
        grant = _grant_of(record, now)
        return replace(grant, taken_from=before.info.trace) if before is not None and before.info.trace else grant


def _seconds(duration: float) -> float:
    return microseconds(duration) / 1_000_000


def _grant_of(record: Record, now: float) -> Grant:
    return Grant(record.token, record.fence, record.attempt, lease=max(record.deadline - now, 0.0))
