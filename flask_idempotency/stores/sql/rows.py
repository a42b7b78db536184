"""Turn rows into records, check that a row is valid, and escape the texts that a database refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from flask_idempotency.engine import model
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.stores.sql import schema

RowT = TypeVar("RowT")

TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 17
KID_LETTERS: Final = 255

LARGEST_SIZE: Final = 2**53
"""Largest size of a response, in bytes. Sums of larger ones would overflow a database's integers."""

_BIG: Final = 2**63 - 1
_LATEST_US: Final = int(model.LATEST) * 1_000_000
_LARGEST_STATUS: Final = 2**15 - 1

_STATES: Final = {
    schema.PROCESSING: model.State.PROCESSING,
    schema.COMPLETED: model.State.COMPLETED,
    schema.FAILED: model.State.COMPLETED,
    schema.QUARANTINED: model.State.QUARANTINED,
}
_RULES: Final = {schema.TAKEOVER: model.OnExpiry.TAKEOVER, schema.QUARANTINE: model.OnExpiry.QUARANTINE}


def _escaped(letter: re.Match[str]) -> str:
    return f"␛{ord(letter[0]):04x}"


escape: Final = partial(re.compile("[\0\ud800-\udfff␛]").sub, _escaped)
"""Escape a text for every database: PostgreSQL refuses NUL, and encodings refuse lone surrogates.

Different texts stay different.
"""
unescape: Final = partial(re.compile("␛([0-9a-f]{4})").sub, lambda letter: chr(int(letter[1], 16)))
"""Reverse `escape`."""


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
    response_expires_at: int | None
    erased: bool | int | None
    """Not a column of the row: the statement reads it from the tenant."""
    now: int

    @property
    def kept_until(self) -> int | None:
        """When its response expires, if the record is remembered for longer."""
        until, completed_at = self.response_expires_at, self.completed_at
        if until is None or completed_at is None or self.state not in schema.ANSWERED:
            return None
        # The release before claims an expired row again, and leaves this column as it was.
        return until if until >= completed_at else None

    @property
    def deadline(self) -> int:
        """When its lease expires. If the row is completed, when its response does; if it is released, when it expires."""
        if self.response_expires_at is not None and (kept := self.kept_until) is not None:
            return kept
        deadline = self.lease_expires_at if self.state in (schema.PROCESSING, schema.QUARANTINED) else self.expires_at
        if deadline is None:
            raise CorruptRecord("the row has no deadline")
        return deadline

    def record(self) -> model.Record:
        deadline, payload = self.deadline, None
        if self.response is not None and self.status is not None and self.response_size is not None:
            success = self.state == schema.COMPLETED if self.succeeded is None else bool(self.succeeded)
            sealed_by = None
            if self.wrapping_key_id is not None and self.data_key_number is not None:
                sealed_by = model.SealedBy(self.wrapping_key_id, self.data_key_number)
            payload = model.StoredPayload(self.response, self.status, success, self.response_size, sealed_by)
        until = None
        if self.response_expires_at is not None and self.kept_until is not None and self.expires_at is not None:
            until = self.expires_at / 1_000_000
            if deadline <= self.now:
                payload = model.skeleton_of(payload)
        method, trace = unescape(self.method), ""
        if method[model.TRACED_AT] == model.TRACED:
            method, trace = model.method_and_trace(method)
        return model.Record(
            state=_STATES[self.state],
            token=self.token,
            fence=self.fence,
            attempt=self.attempt,
            fingerprint=self.fingerprint,
            on_expiry=_RULES[self.on_expiry],
            info=model.RequestInfo(
                unescape(self.tenant), unescape(self.principal), method, unescape(self.endpoint), trace
            ),
            requested_at=self.requested_at / 1_000_000,
            deadline=deadline / 1_000_000,
            remaining=(deadline - self.now) / 1_000_000,
            completed_at=None if self.completed_at is None else self.completed_at / 1_000_000,
            payload=payload,
            reason=unescape(self.reason or ""),
            in_quota=bool(self.in_quota),
            erased=bool(self.erased) and payload is not None,
            remembered_until=until,
        )


_RESPONSE: Final = Row._fields.index("response")


def row_of(columns: Sequence[Any]) -> Row:
    """Return these columns as a row.

    Raise `CorruptRecord` if this package did not write it. Such a key is never free.
    """
    # Any: on SQLite, other tools can write values of every type into every column.
    row: Any = Row(*columns)
    check_standing(row)
    fingerprint, response, kid = row.fingerprint, row.response, row.wrapping_key_id
    if row.on_expiry not in _RULES or not isinstance(fingerprint, bytes) or len(fingerprint) != FINGERPRINT_BYTES:
        raise CorruptRecord("the row's on_expiry or its fingerprint is invalid")
    for number, largest in ((row.fence, _BIG), (row.attempt, _BIG), (row.in_quota, 1)):
        if not isinstance(number, int) or not 0 <= number <= largest:
            raise CorruptRecord("the row's fence, attempt or in_quota is invalid")
    ended = 0 if row.completed_at is None else row.completed_at, 0 if row.expires_at is None else row.expires_at
    kept = 0 if row.response_expires_at is None else row.response_expires_at
    for time in (row.requested_at, 0 if row.lease_expires_at is None else row.lease_expires_at, kept, *ended):
        if not isinstance(time, int) or not 0 <= time <= _LATEST_US:
            raise CorruptRecord("the row holds an invalid time, or one after the year 9999")
    if row.deadline > _LATEST_US:  # raises if there is none
        raise CorruptRecord("the row holds an invalid time, or one after the year 9999")
    for text in (row.tenant, row.principal, row.method, row.endpoint, "" if row.reason is None else row.reason):
        if not isinstance(text, str):
            raise CorruptRecord("the row holds a value that is not text in a text column")
    if response is not None and (not isinstance(response, bytes) or len(response) > model.LARGEST_PAYLOAD):
        raise CorruptRecord("the row holds a response with an invalid size or status")
    for number, largest in ((row.status, _LARGEST_STATUS), (row.response_size, LARGEST_SIZE)):
        if number is not None and (not isinstance(number, int) or not 0 <= number <= largest):
            raise CorruptRecord("the row holds a response with an invalid size or status")
    if row.succeeded is not None and not isinstance(row.succeeded, int):
        raise CorruptRecord("the row's succeeded is not a number")
    if response is None or row.completed_at is None or row.status is None or row.response_size is None:
        if row.state in schema.ANSWERED:
            raise CorruptRecord("the row is completed, but holds no response")
        if row.state == schema.QUARANTINED and row.reason == model.CORRUPT:
            raise CorruptRecord("the row was quarantined as unreadable, and holds no response")
    if kid is not None or row.data_key_number is not None:
        number = row.data_key_number
        if not isinstance(kid, str) or len(kid) > KID_LETTERS or not isinstance(number, int) or not 0 <= number <= _BIG:
            raise CorruptRecord("the row's wrapping key or data key number is invalid")
    found: Row = row
    return found


def readable(rows: Iterable[Any], decode: Callable[[Any], RowT]) -> list[RowT]:
    """Decode these rows. Skip damaged ones: the next claim of their key reports them."""
    found = []
    for row in rows:
        with suppress(CorruptRecord):
            found.append(decode(row))
    return found


def completed_row(columns: Any, response: bytes) -> Row:
    """Return the row that `completion.complete` with `tells` has written, with this response."""
    return row_of((*columns[:_RESPONSE], response, *columns[_RESPONSE:]))


def check_standing(row: Any) -> None:
    """Raise `CorruptRecord` if the state, the token or the times of this row are invalid."""
    if row.state not in schema.STATES or not isinstance(row.token, bytes) or len(row.token) != TOKEN_BYTES:
        raise CorruptRecord("the row's state or its token is invalid")
    if row.state in (schema.COMPLETED, schema.FAILED, schema.RELEASED) and not isinstance(row.expires_at, int):
        raise CorruptRecord("the row has ended, but has no time to expire")
    if row.state in schema.ANSWERED and (not isinstance(row.completed_at, int) or row.expires_at < row.completed_at):
        raise CorruptRecord("the row expires before its completion")


def is_gone(row: Any) -> bool:
    """Return True if a claim finds the key free here: it was released, or its response has expired."""
    if row.state == schema.RELEASED:
        return True
    return row.state in schema.ANSWERED and row.expires_at is not None and bool(row.expires_at <= row.now)


def is_condemned(row: Any) -> bool:
    """Return True if the row was completed, or may have been, before it was quarantined: to its owner it is completed.

    The column `answered` shows if the row holds a response.
    """
    return bool(row.state == schema.QUARANTINED and (row.answered or row.reason == model.CORRUPT))


def is_settled(found: Any | None, token: bytes, done: tuple[str, ...]) -> bool:
    """Return True if this write is already applied. Raise `LeaseLost` if the token lost the record."""
    if found is not None:
        check_standing(found)
    if found is None or is_gone(found):
        raise LeaseLost("the record is gone")
    if found.token != token:
        raise LeaseLost("the record belongs to another worker")
    if schema.COMPLETED not in done and (found.state in schema.ANSWERED or is_condemned(found)):
        raise LeaseLost("the record is completed")
    return found.state in done
