"""What a store is to say and to keep, in the fewest words: no index, no clock of its own, and nothing that can fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    CORRUPT,
    LAPSED,
    ClaimRequest,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    Record,
    State,
    StoredPayload,
    Unknown,
)

UNSAID = -1
"""The deadline of a condemned record: time does not end it, and each store has another one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key's record. Whole seconds, so that no store has to round any."""

    state: State
    token: bytes
    attempt: int
    fingerprint: bytes
    on_expiry: OnExpiry
    first_seen: int
    deadline: int
    payload: StoredPayload | None = None
    completed_at: int | None = None
    reason: str = ""

    @property
    def answered(self) -> bool:
        """Also one that was condemned: the work was done."""
        return self.payload is not None


Seen: TypeAlias = tuple[State, bytes, int]
"""State, token and deadline: what somebody must have seen to change a record that is not theirs."""

Told: TypeAlias = tuple[type, object]
"""Which outcome, and the one thing in it that counts."""


class Reference:
    """Any number of keys, at one time. A verb returns what is to be told; one that loses its claim returns False."""

    def __init__(self, now: int) -> None:
        self.now = now
        self._rows: dict[StorageKey, Row] = {}

    def row(self, key: StorageKey) -> Row | None:
        row = self._rows.get(key)
        return None if row is None or self.over(row) else row

    def over(self, row: Row) -> bool:
        """Whether time has ended it: an answer's, and nobody else's."""
        return row.state is State.COMPLETED and row.deadline <= self.now

    def ended(self) -> set[StorageKey]:
        """Keys of answers whose life is over, and which a clock that is set back may bring to life again, or not."""
        return {key for key, row in self._rows.items() if self.over(row)}

    def forget(self, key: StorageKey) -> None:
        """The store has thrown away what was over."""
        del self._rows[key]

    def hear(self, key: StorageKey, deadline: int) -> None:
        """The store has said what this left to it. From now on it stays so."""
        self._rows[key] = replace(self._rows[key], deadline=deadline)

    def claim(self, request: ClaimRequest, token: bytes, lease: int) -> Told:
        row = self.row(request.key)
        granted = Row(
            State.PROCESSING, token, 1, request.fingerprint, request.on_expiry, self.now, deadline=self.now + lease
        )
        if row is None:
            self._rows[request.key] = granted
            return Grant, 1
        if row.fingerprint != request.fingerprint:
            return Mismatched, row.first_seen
        if row.state is State.COMPLETED:
            return Record, row.payload
        if row.state is State.QUARANTINED:
            return Unknown, row.reason
        if row.token == token:
            return Grant, row.attempt
        if row.deadline > self.now:
            return InFlight, row.deadline - self.now
        if row.on_expiry is OnExpiry.QUARANTINE:
            self._rows[request.key] = replace(row, state=State.QUARANTINED, reason=LAPSED)
            return Unknown, LAPSED
        self._rows[request.key] = replace(granted, attempt=row.attempt + 1, first_seen=row.first_seen)
        return Grant, row.attempt + 1

    def would_grant(self, request: ClaimRequest, token: bytes) -> bool:
        """Whether this claim would change whose the key is."""
        row = self.row(request.key)
        if row is None:
            return True
        lapsed = row.state is State.PROCESSING and row.deadline <= self.now and row.on_expiry is OnExpiry.TAKEOVER
        return lapsed and row.token != token and row.fingerprint == request.fingerprint

    def renew(self, key: StorageKey, token: bytes, lease: int) -> bool:
        row = self._owned(key, token)
        if row is None:
            return False
        if row.state is State.PROCESSING or row.reason == LAPSED:
            self._rows[key] = replace(row, deadline=max(row.deadline, self.now + lease))
        return True

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> bool:
        row = self._unanswered(key, token)
        if row is not None and row.state is State.PROCESSING:
            self._rows[key] = replace(row, on_expiry=OnExpiry.QUARANTINE)
        return row is not None

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, keep: int) -> bool:
        row = self._owned(key, token)
        if row is not None and row.state is not State.COMPLETED:
            self._rows[key] = self._completed(row, payload, keep)
        return row is not None

    def release(self, key: StorageKey, token: bytes) -> bool:
        if self.row(key) is None:
            return True
        row = self._unanswered(key, token)
        if row is not None:
            del self._rows[key]
        return row is not None

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> bool:
        row = self._unanswered(key, token)
        if row is not None and row.state is State.PROCESSING:
            self._rows[key] = replace(row, state=State.QUARANTINED, reason=reason)
        return row is not None

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        row = self.row(key)
        if row is not None and row.state is State.COMPLETED and row.payload == payload:
            self._rows[key] = replace(row, state=State.QUARANTINED, reason=CORRUPT, deadline=UNSAID)

    def lapse(self, key: StorageKey, seen: Seen, horizon: int) -> bool:
        row = self._as_seen(key, seen)
        if row is None or not self._stale(row, horizon):
            return False
        self._rows[key] = replace(row, state=State.QUARANTINED, reason=LAPSED)
        return True

    def reap(self, horizon: int) -> None:
        for key, row in list(self._rows.items()):
            if self._stale(row, horizon):
                self._rows[key] = replace(row, state=State.QUARANTINED, reason=LAPSED)

    def settle(self, key: StorageKey, seen: Seen, token: bytes, payload: StoredPayload, keep: int) -> bool:
        row = self.row(key)
        if row is not None and row.state is State.COMPLETED and row.token == token:
            return True
        row = self._as_seen(key, seen)
        if row is None or row.state is not State.QUARANTINED:
            return False
        self._rows[key] = self._completed(replace(row, token=token), payload, keep)
        return True

    def free(self, key: StorageKey, seen: Seen) -> bool:
        if self._as_seen(key, seen) is None:
            return False
        del self._rows[key]
        return True

    def _owned(self, key: StorageKey, token: bytes) -> Row | None:
        row = self.row(key)
        return row if row is not None and row.token == token else None

    def _unanswered(self, key: StorageKey, token: bytes) -> Row | None:
        row = self._owned(key, token)
        return None if row is None or row.answered else row

    def _as_seen(self, key: StorageKey, seen: Seen) -> Row | None:
        row = self.row(key)
        return row if row is not None and (row.state, row.token, row.deadline) == seen else None

    def _stale(self, row: Row, horizon: int) -> bool:
        lapsed = row.state is State.PROCESSING and row.deadline <= min(horizon, self.now)
        return lapsed and row.on_expiry is OnExpiry.QUARANTINE

    def _completed(self, row: Row, payload: StoredPayload, keep: int) -> Row:
        # Under a clock that was set back it would end before it began.
        at = max(self.now, row.first_seen)
        return replace(row, state=State.COMPLETED, deadline=at + keep, completed_at=at, payload=payload, reason="")
