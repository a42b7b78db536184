"""Row ⇄ record: what a row must look like to be one of ours, and how texts are written that a database refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
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


def _escaped(letter: re.Match[str]) -> str:
    return f"␛{ord(letter[0]):04x}"


def _unescaped(letter: re.Match[str]) -> str:
    return chr(int(letter[1], 16))


escape: Final = partial(re.compile("[\0\ud800-\udfff␛]").sub, _escaped)
"""Write this text in letters that every database takes: PostgreSQL has no NUL, and no encoding has lone surrogates.

No two texts become one."""
unescape: Final = partial(re.compile("␛([0-9a-f]{4})").sub, _unescaped)
"""Read a text that `escape` has written."""


class Row(NamedTuple):
    """A row as `statements.columns` selects it. Times are microseconds since the epoch, by the server's clock."""

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
    def deadline(self) -> int:
        """When its lease ends; when the life of its response ends if it is completed or released."""
        deadline = self.lease_expires_at if self.state in (PROCESSING, QUARANTINED) else self.expires_at
        if deadline is None:
            raise CorruptRecord("a record without a deadline cannot be ours")
        return deadline

    def record(self) -> Record:
        deadline, payload = self.deadline, None
        if self.response is not None and self.status is not None and self.response_size is not None:
            success = self.state == COMPLETED if self.succeeded is None else bool(self.succeeded)
            sealed_by = None
            if self.wrapping_key_id is not None and self.data_key_number is not None:
                sealed_by = SealedBy(self.wrapping_key_id, self.data_key_number)
            payload = StoredPayload(self.response, self.status, success, self.response_size, sealed_by)
        return Record(
            state=_STATES[self.state],
            token=self.token,
            fence=self.fence,
            attempt=self.attempt,
            fingerprint=self.fingerprint,
            on_expiry=_RULES[self.on_expiry],
            info=RequestInfo(
                unescape(self.tenant), unescape(self.principal), unescape(self.method), unescape(self.endpoint)
            ),
            requested_at=self.requested_at / 1_000_000,
            deadline=deadline / 1_000_000,
            remaining=(deadline - self.now) / 1_000_000,
            completed_at=None if self.completed_at is None else self.completed_at / 1_000_000,
            payload=payload,
            reason=unescape(self.reason or ""),
            in_quota=bool(self.in_quota),
            erased=bool(self.erased) and payload is not None,
        )


def row_of(columns: Sequence[Any]) -> Row:
    """Return the row that these columns are.

    Raise `CorruptRecord` if this package did not write it. Such a row is never taken for absent.
    """
    # Any: SQLite lets other tools write values of every type into every column.
    row: Any = Row(*columns)
    check_standing(row)
    fingerprint, response, kid = row.fingerprint, row.response, row.wrapping_key_id
    if row.on_expiry not in _RULES or not isinstance(fingerprint, bytes) or len(fingerprint) != FINGERPRINT_BYTES:
        raise CorruptRecord("the row's rule or its fingerprint is none of ours")
    for number, largest in ((row.fence, _BIG), (row.attempt, _BIG), (row.in_quota, 1)):
        if not isinstance(number, int) or not 0 <= number <= largest:
            raise CorruptRecord("the row's fence or its attempt is no number of ours")
    ended = 0 if row.completed_at is None else row.completed_at, 0 if row.expires_at is None else row.expires_at
    for time in (row.requested_at, row.deadline, *ended):
        if not isinstance(time, int) or not 0 <= time <= _LATEST_US:
            raise CorruptRecord("the row holds a time that is none, or lies behind the year 9999")
    for text in (row.tenant, row.principal, row.method, row.endpoint, "" if row.reason is None else row.reason):
        if not isinstance(text, str):
            raise CorruptRecord("the row holds something else than texts where those belong")
    if response is not None and (not isinstance(response, bytes) or len(response) > LARGEST_PAYLOAD):
        raise CorruptRecord("the row holds a response of a size or a status that no response has")
    for number, largest in ((row.status, _LARGEST_STATUS), (row.response_size, LARGEST_SIZE)):
        if number is not None and (not isinstance(number, int) or not 0 <= number <= largest):
            raise CorruptRecord("the row holds a response of a size or a status that no response has")
    if row.succeeded is not None and not isinstance(row.succeeded, int):
        raise CorruptRecord("the row does not say whether its response is a success")
    if response is None or row.completed_at is None or row.status is None or row.response_size is None:
        if row.state in (COMPLETED, FAILED):
            raise CorruptRecord("the row says that it is completed, and holds no response")
        if row.state == QUARANTINED and row.reason == CORRUPT:
            raise CorruptRecord("the row could not be read when it was claimed, and what it was is lost")
    if kid is not None or row.data_key_number is not None:
        number = row.data_key_number
        if not isinstance(kid, str) or len(kid) > KID_LETTERS or not isinstance(number, int) or not 0 <= number <= _BIG:
            raise CorruptRecord("the row does not say which key opens its response")
    found: Row = row
    return found


def completed_row(columns: Any, response: bytes) -> Row:
    """Return the row that `completion.complete` with `tells` has written, with the response that it was given."""
    return row_of(Row(response=response, **columns._mapping))


def check_standing(row: Any) -> None:
    """Raise `CorruptRecord` unless the state, the token and the times of this row can be ours."""
    if row.state not in STATES or not isinstance(row.token, bytes) or len(row.token) != TOKEN_BYTES:
        raise CorruptRecord("the row's state or its token is none of ours")
    if row.state in (COMPLETED, FAILED, RELEASED) and not isinstance(row.expires_at, int):
        raise CorruptRecord("the row says that it has ended, and does not say until when it is kept")
    if row.state in (COMPLETED, FAILED) and (
        not isinstance(row.completed_at, int) or row.expires_at < row.completed_at
    ):
        raise CorruptRecord("the row says that the life of its response was over before it began")


def is_gone(row: Any) -> bool:
    """Return True if a claim finds the key free here: it was released, or its response has expired."""
    if row.state == RELEASED:
        return True
    return row.state in (COMPLETED, FAILED) and row.expires_at is not None and bool(row.expires_at <= row.now)


def is_condemned(row: Any) -> bool:
    """Return True if the row was completed, or may have been, before it was quarantined: to its owner it is completed.

    The row tells in `answered` whether it holds a response.
    """
    return bool(row.state == QUARANTINED and (row.answered or row.reason == CORRUPT))
