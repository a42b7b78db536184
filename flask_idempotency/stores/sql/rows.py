"""Row ⇄ record: what a row must look like to be one of ours, and how texts are written that a database refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.model import (
    CORRUPT,
    LARGEST_PAYLOAD,
    LATEST,
    OnExpiry,
    Record,
    RequestInfo,
    SealedBy,
    State,
    StoredPayload,
)
from flask_idempotency.stores.sql.schema import (
    COMPLETED,
    FAILED,
    PROCESSING,
    QUARANTINED,
    RELEASED,
    STATES,
    TAKEOVER,
)
from flask_idempotency.stores.sql.schema import QUARANTINE as QUARANTINE_ON_LAPSE

TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 17
KID_LETTERS: Final = 255

LARGEST_SIZE: Final = 2**53
"""Bytes of an answer, as they are counted: sums of larger ones would not fit into a database's numbers."""

_BIG: Final = 2**63 - 1
_LATEST_US: Final = int(LATEST) * 1_000_000
_LARGEST_STATUS: Final = 2**15 - 1

_STATES: Final = {
    PROCESSING: State.PROCESSING,
    COMPLETED: State.COMPLETED,
    FAILED: State.COMPLETED,
    QUARANTINED: State.QUARANTINED,
}
_RULES: Final = {TAKEOVER: OnExpiry.TAKEOVER, QUARANTINE_ON_LAPSE: OnExpiry.QUARANTINE}

# PostgreSQL has no text with NUL, and no encoding has lone surrogates.
_REFUSED = re.compile("[\0\ud800-\udfff␛]")
_ESCAPED = re.compile("␛([0-9a-f]{4})")


class Row(NamedTuple):
    """A row as `clauses.columns` selects it. Times are microseconds since the epoch, by the server's clock."""

    state: str
    token: bytes
    fence: int
    attempt: int
    fingerprint: bytes
    on_expiry: str
    tenant: str
    principal: str
    method: str
    endpoint: str
    requested_at: int
    lease_expires_at: int | None
    completed_at: int | None
    expires_at: int | None
    status: int | None
    response_size: int | None
    response: bytes | None
    reason: str | None
    in_quota: int
    wrapping_key_id: str | None
    data_key_number: int | None
    succeeded: int | None
    erased: bool | int | None
    """Not of the row: what is known of the tenant, in the same look."""
    now: int

    @property
    def absent(self) -> bool:
        """Whether a claim finds nothing here: released, or an answer whose time is over."""
        return gone(self.state, self.expires_at, self.now)

    @property
    def left(self) -> int:
        """Microseconds until its lease or its answer's life ends; negative when past."""
        return self._deadline - self.now

    @property
    def lapsed(self) -> bool:
        return self.state == PROCESSING and self.left <= 0

    @property
    def _deadline(self) -> int:
        deadline = self.lease_expires_at if self.state in (PROCESSING, QUARANTINED) else self.expires_at
        if deadline is None:
            raise CorruptRecord("a record without a deadline cannot be ours")
        return deadline

    def record(self) -> Record:
        payload = self._payload()
        return Record(
            state=_STATES[self.state],
            token=self.token,
            fence=self.fence,
            attempt=self.attempt,
            fingerprint=self.fingerprint,
            on_lapse=_RULES[self.on_expiry],
            about=RequestInfo(*map(unescape, (self.tenant, self.principal, self.method, self.endpoint))),
            requested_at=self.requested_at / 1_000_000,
            deadline=self._deadline / 1_000_000,
            remaining=self.left / 1_000_000,
            completed_at=None if self.completed_at is None else self.completed_at / 1_000_000,
            payload=payload,
            reason=unescape(self.reason or ""),
            counted=bool(self.in_quota),
            erased=bool(self.erased) and payload is not None,
        )

    def _payload(self) -> StoredPayload | None:
        if self.response is None or self.status is None or self.response_size is None:
            return None
        sealed_by = (
            None
            if self.wrapping_key_id is None or self.data_key_number is None
            else SealedBy(self.wrapping_key_id, self.data_key_number)
        )
        success = self.state == COMPLETED if self.succeeded is None else bool(self.succeeded)
        return StoredPayload(self.response, self.status, success, self.response_size, sealed_by)


def row_of(columns: Sequence[Any]) -> Row:
    """The row that these columns are. Raises `CorruptRecord` for what is not ours: it is never taken for absent."""
    row = Row(*columns)
    check_standing(row.state, row.token, row.completed_at, row.expires_at)
    if row.on_expiry not in _RULES or not _is_bytes(row.fingerprint, FINGERPRINT_BYTES):
        raise CorruptRecord("the row's rule or its fingerprint is none of ours")
    if not (_is_number(row.fence, _BIG) and _is_number(row.attempt, _BIG) and _is_number(row.in_quota, 1)):
        raise CorruptRecord("the row's fence or its attempt is no number of ours")
    times = row.requested_at, row._deadline, *(each for each in (row.completed_at, row.expires_at) if each is not None)
    if not all(_is_number(time, _LATEST_US) for time in times):
        raise CorruptRecord("the row holds a time that is none, or lies behind the year 9999")
    texts = row.tenant, row.principal, row.method, row.endpoint, *(() if row.reason is None else (row.reason,))
    if not all(isinstance(text, str) for text in texts):
        raise CorruptRecord("the row holds something else than texts where those belong")
    if not _is_payload(row):
        raise CorruptRecord("the row holds an answer of a size or a status that no answer has")
    if row.state in (COMPLETED, FAILED) and not _has_answer(row):
        raise CorruptRecord("the row says that it is completed, and holds no answer")
    if row.state == QUARANTINED and row.reason == CORRUPT and not _has_answer(row):
        raise CorruptRecord("the row could not be read when it was claimed, and what it was is lost")
    if not _names_its_key(row):
        raise CorruptRecord("the row does not say which key opens its answer")
    return row


def completed_row(columns: Any, response: bytes) -> Row:
    """The row that a `completions.complete` which tells has written, with the answer that it was given."""
    return row_of(Row(response=response, **columns._mapping))


def check_standing(state: object, token: object, completed_at: object, expires_at: object) -> None:
    """Raises `CorruptRecord` unless a row with these can be ours."""
    if state not in STATES or not _is_bytes(token, TOKEN_BYTES):
        raise CorruptRecord("the row's state or its token is none of ours")
    if state in (COMPLETED, FAILED, RELEASED) and not isinstance(expires_at, int):
        raise CorruptRecord("the row says that it has ended, and does not say until when it is kept")
    if state in (COMPLETED, FAILED) and not _follows(expires_at, completed_at):
        raise CorruptRecord("the row says that its answer's life was over before it began")


def gone(state: str, expires_at: int | None, now: int) -> bool:
    """Whether a row in this state is absent to everybody who asks."""
    if state == RELEASED:
        return True
    return state in (COMPLETED, FAILED) and expires_at is not None and expires_at <= now


def condemned(state: str, reason: str | None, *, answered: bool) -> bool:
    """Whether a row was completed, or may have been, before it was quarantined: to its owner it is completed."""
    return state == QUARANTINED and (answered or reason == CORRUPT)


def escape(text: str) -> str:
    """This text in letters that every database takes. No two texts become one."""
    return _REFUSED.sub(lambda found: f"␛{ord(found[0]):04x}", text)


def unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def _follows(later: object, earlier: object) -> bool:
    return isinstance(later, int) and isinstance(earlier, int) and earlier <= later


def _is_number(value: object, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most


def _is_payload(row: Row) -> bool:
    """Whether each part of an answer that is there can be a part of one."""
    answer: object = row.response
    return (
        (answer is None or (isinstance(answer, bytes) and len(answer) <= LARGEST_PAYLOAD))
        and (row.status is None or _is_number(row.status, _LARGEST_STATUS))
        and (row.response_size is None or _is_number(row.response_size, LARGEST_SIZE))
        and (row.succeeded is None or isinstance(row.succeeded, int))
    )


def _is_bytes(value: object, size: int) -> bool:
    return isinstance(value, bytes) and len(value) == size


def _names_its_key(row: Row) -> bool:
    if row.wrapping_key_id is None and row.data_key_number is None:
        return True
    return (
        isinstance(row.wrapping_key_id, str)
        and len(row.wrapping_key_id) <= KID_LETTERS
        and _is_number(row.data_key_number, _BIG)
    )


def _has_answer(row: Row) -> bool:
    numbers = row.completed_at, row.status, row.response_size
    return isinstance(row.response, bytes) and all(isinstance(number, int) for number in numbers)
