"""Encode a record as one string: 77 bytes of header, the request that it belongs to, and its outcome.

     0     1  format (high three bits), state (two), take over on expiry, success, counted (one each). In flight, the
              success bit means that requests may wait for the completion
     1    16  token
    17     7  fence
    24     1  attempt, never above 255
    25    17  fingerprint
    42     6  requested_at   ┐
    48     6  deadline       │ milliseconds, big-endian
    54     5  duration       ┘
    59     2  status
    61    16  tid
    77   3+n  about: length, then tenant, principal, method and operation, each after its length
          m   completed: byte_size, the key that it is sealed by, and the payload
              quarantined: the reason after its length; then, if the record was completed and is corrupt, the fields above
              processing: nothing

The last text of a completed record that is remembered for longer than its response ends in "\\0~" and 15 digits: until when,
in milliseconds. The release before shows them in that text. It replays the response, and after `deadline` it finds a record
that Redis keeps for too long, and refuses the key as damaged.

A length takes as few bytes as it needs, seven bits in each. So does the data key's number plus one. The wrapping key's
id follows, after its length. A response that is not sealed has only a zero there.

`lua/lib/write.lua` writes this format. A hash of the same fields would take half as much memory again, and could exist
with only some of its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Final, NamedTuple

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import TID_BYTES
from flask_idempotency.engine.model import (
    LARGEST_PAYLOAD,
    LATEST,
    Callers,
    OnExpiry,
    Record,
    RequestInfo,
    SealedBy,
    State,
    StoredPayload,
    method_and_trace,
    skeleton_of,
)
from flask_idempotency.stores import bucket_width_ms, microseconds
from flask_idempotency.stores.redis.executor import whole_number

if TYPE_CHECKING:
    from flask_idempotency.engine.quota import Quota

TOKEN_BYTES = 16
FINGERPRINT_BYTES = 17
ABOUT_TEXT_BYTES = 65536
"""Longest text about a request. The store cuts longer ones.

An application's principal may be as long as a whole token. Its beginning is enough for an auditor, and no reason to refuse
a payment.
"""

KID_BYTES: Final = 255
"""Longest id of a wrapping key: stored data keys have one byte for this length."""
_UNTIL: Final = b"\0~"
_UNTIL_BYTES: Final = 17
"""The end of the last text of a record that is remembered for longer than its response. `lua/lib/remembered.lua` reads it."""
LARGEST_BYTES: Final = LARGEST_PAYLOAD + 8 * ABOUT_TEXT_BYTES
"""Longest record. `lua/lib/record.lua` has the same number."""
_LENGTH_BYTES: Final = 9
"""Longest encoding of a length, also in `lua/lib/length.lua`. It holds 63 bits. Longer ones take quadratic time to read."""
_LATEST_MS: Final = int(LATEST) * 1000

_CACHED_SIZE: Final = 512
"""Texts of a request that are longer than this together are not cached. They come from applications without Flask."""

_CUT = "…".encode()
_FORMAT = 1
_HEADER = Struct(">B16s7sB17s6s6s5sH16s3s")
TID_AT = slice(61, 61 + TID_BYTES)
_SHORT = [bytes((number,)) for number in range(128)]
_STATES = {1: State.PROCESSING, 2: State.COMPLETED, 3: State.QUARANTINED}
NUMBERS = {state: number for number, state in _STATES.items()}
"""The number of each state, as records store it and scripts get it."""


def about_bytes(about: RequestInfo) -> bytes:
    """Encode the request's texts for a record, after their length. Cut a text that is too long, and end it in "…"."""
    texts = about.tenant, about.principal, about.traced_method if about.trace else about.method, about.operation
    # A text with a trace is a new one in each request.
    encode = (
        _texts if not about.trace and len(about.tenant) + len(about.principal) <= _CACHED_SIZE else _texts.__wrapped__
    )
    return encode(*texts)


def callers_of(callers: Callers) -> tuple[bytes, ...]:
    """Encode callers for `claim.lua`: how many pairs are shown, those, and the unnamed ones.

    Each pair is as a record begins its texts with it, so that no pair is the beginning of another.
    """
    shown, unnamed = ([_joined(pair) for pair in pairs] for pairs in (callers.shown, callers.unnamed))
    return b"%d" % len(shown), *shown, *unnamed


@lru_cache(maxsize=1024)
def _texts(*texts: str) -> bytes:
    fields = _joined(texts)
    return len(fields).to_bytes(3, "big") + fields


def _joined(texts: Sequence[str]) -> bytes:
    parts = list[bytes]()
    for text in texts:
        # A tenant or a principal may be any str, lone surrogates included.
        data = text[: ABOUT_TEXT_BYTES + 1].encode("utf-8", "surrogatepass")
        if len(data) < 128:
            parts += _SHORT[len(data)], data
        else:
            parts.append(_long_text(data))
    return b"".join(parts)


def payload_bytes(payload: StoredPayload) -> bytes:
    """Encode the part of a payload that scripts compare but do not read. Raise `ValueError` if it does not fit."""
    if payload.sealed_by is None:
        return length_bytes(payload.byte_size) + b"\0" + payload.data
    by, kid = payload.sealed_by, payload.sealed_by.kid.encode()
    if by.number < 0 or len(kid) > KID_BYTES:
        raise ValueError(f"a negative number of a data key, or a key's id over {KID_BYTES} bytes, does not fit")
    return b"".join(
        (length_bytes(payload.byte_size), length_bytes(by.number + 1), length_bytes(len(kid)), kid, payload.data)
    )


def read_payload(data: bytes, at: int, status: int, *, success: bool) -> StoredPayload:
    """Decode what `payload_bytes` wrote from this position on. Raise `CorruptRecord` or `IndexError` for other bytes."""
    byte_size, at = read_length(data, at)
    number, at = (data[at], at + 1) if data[at] < 128 else read_length(data, at)
    sealed_by = None
    if number:
        size, start = read_length(data, at)
        at = start + size
        if size > KID_BYTES or at > len(data):
            raise CorruptRecord("the key's id in the record in Redis is cut short, or too long")
        sealed_by = SealedBy(data[start:at].decode(), number - 1)
    return StoredPayload(data[at:], status, success, byte_size, sealed_by)


def reason_bytes(reason: str) -> bytes:
    """Encode a quarantine's reason for a record, after its length. Cut one that is too long."""
    return _long_text(reason[: ABOUT_TEXT_BYTES + 1].encode("utf-8", "surrogatepass"))


def reason_of(data: bytes) -> str:
    """Decode why a record is quarantined. Raise `CorruptRecord` if it is not text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("the quarantine's reason in Redis is not text") from error


def decode(data: bytes, *, now: float) -> Record:
    """Decode a record. Raise `CorruptRecord` if this release did not write these bytes."""
    if not _HEADER.size <= len(data) <= LARGEST_BYTES:
        raise CorruptRecord(f"the record in Redis has {len(data)} bytes, not {_HEADER.size} to {LARGEST_BYTES}")
    first, token, fence, attempt, fingerprint, requested, ends, took, status, _, about_size = _HEADER.unpack_from(data)
    if first >> 5 != _FORMAT:
        raise CorruptRecord(f"this release does not know record format {first >> 5}")
    requested_ms, deadline_ms = int.from_bytes(requested, "big"), int.from_bytes(ends, "big")
    completed_ms, deadline = requested_ms + int.from_bytes(took, "big"), deadline_ms / 1000
    if completed_ms > _LATEST_MS or deadline_ms > _LATEST_MS:
        raise CorruptRecord("the record in Redis has a time after the year 9999")
    completed_at = payload = None
    reason, at = "", _HEADER.size
    tail = at + int.from_bytes(about_size, "big")
    try:
        state = _STATES[first >> 3 & 3]
        if state is State.COMPLETED and deadline_ms < completed_ms:
            raise CorruptRecord("the response in Redis expires before it was completed")
        if tail > len(data):
            raise CorruptRecord("the texts in the record in Redis are cut short")
        fields, until, cut = data[at:tail], None, 0
        if fields[-_UNTIL_BYTES : 2 - _UNTIL_BYTES] == _UNTIL and fields[2 - _UNTIL_BYTES :].isdigit():
            fields, until, cut = fields[:-_UNTIL_BYTES], int(fields[2 - _UNTIL_BYTES :]) / 1000, _UNTIL_BYTES
            if until > LATEST:
                raise CorruptRecord("the record in Redis has a time after the year 9999")
        info = (_info if len(fields) <= _CACHED_SIZE else _info.__wrapped__)(fields, cut)
        at = tail
        if state is State.QUARANTINED:
            size, start = read_length(data, at)
            at = start + size
            if size > ABOUT_TEXT_BYTES or at > len(data):
                raise CorruptRecord("the quarantine's reason in Redis is cut short")
            reason = reason_of(data[start:at])
        if state is State.COMPLETED or (state is State.QUARANTINED and at < len(data)):
            completed_at = completed_ms / 1000
            payload = read_payload(data, at, status, success=first & 2 == 2)
    except (ValueError, IndexError, KeyError) as error:
        raise CorruptRecord("the bytes in Redis are not a record") from error
    # By position: every replay runs this, and names would cost a microsecond.
    return Record(
        state,
        token,
        int.from_bytes(fence, "big"),
        attempt,
        fingerprint,
        OnExpiry.TAKEOVER if first & 4 else OnExpiry.QUARANTINE,
        info,
        requested_ms / 1000,
        deadline,
        deadline - now,
        completed_at,
        payload,
        reason,
        first & 1 == 1,
        False,
        until if state is State.COMPLETED else None,
    )


def as_kept(record: Record) -> Record | None:
    """Return this record as the store shows it: without a response that has expired. None: all of it has."""
    if record.state is not State.COMPLETED or record.remaining > 0:
        return record
    until = record.remembered_until
    if until is None or until <= record.deadline - record.remaining:
        return None
    return replace(record, payload=skeleton_of(record.payload))


@lru_cache(maxsize=1024)  # a client that retries, or asks often, has the same texts
def _info(fields: bytes, cut: int = 0) -> RequestInfo:
    """Decode what `about_bytes` has encoded, without its length. The last text lacks as many bytes as were cut."""
    at, texts = 0, list[str]()
    for _ in range(4):
        size, start = read_length(fields, at)
        at = start + size
        if size > ABOUT_TEXT_BYTES + cut or at > len(fields) + cut:
            raise CorruptRecord("a text in the record in Redis is too long")
        texts.append(fields[start:at].decode("utf-8", "surrogatepass"))
    if at != len(fields) + cut:
        raise CorruptRecord("the texts in the record in Redis end in the wrong place")
    tenant, principal, method, operation = texts
    method, trace = method_and_trace(method)
    return RequestInfo(tenant, principal, method, operation, trace)


def trace_in(fields: bytes) -> str:
    """Return the trace in the texts of a claim that was taken over. Empty if there is none, or it cannot be read."""
    try:
        return _info.__wrapped__(fields).trace
    except (CorruptRecord, UnicodeDecodeError):
        return ""


def encode(record: Record, *, tid: bytes) -> bytes:
    """Encode a record of this tenant for `decode`, with times to the millisecond.

    Raise `ValueError` if a value does not fit. Unlike `about_bytes`, never cut one.
    """
    sizes = len(record.token), len(record.fingerprint), len(tid)
    about = record.info
    texts = about.tenant, about.principal, about.traced_method, about.operation
    fits = sizes == (TOKEN_BYTES, FINGERPRINT_BYTES, TID_BYTES) and not record.erased
    if not fits or any(len(text.encode("utf-8", "surrogatepass")) > ABOUT_TEXT_BYTES for text in texts):
        raise ValueError("a token, a fingerprint, a tenant or a text does not fit, or the record is erased")
    try:
        return _encode(record, tid)
    except (OverflowError, StructError) as error:
        raise ValueError("a number does not fit") from error


def _encode(record: Record, tid: bytes) -> bytes:
    payload, requested, deadline = record.payload, round(record.requested_at * 1000), round(record.deadline * 1000)
    success, duration, status, tail = False, 0, 0, b""
    if record.state is State.QUARANTINED:
        reason = record.reason.encode()
        tail = length_bytes(len(reason)) + reason
    if record.state is State.COMPLETED or payload is not None:
        if payload is None or record.completed_at is None or payload.byte_size < 0:
            raise ValueError("a completed record needs a payload and a completion time")
        success, status, tail = payload.success, payload.status, tail + payload_bytes(payload)
        duration = round(record.completed_at * 1000) - requested
        if record.state is State.COMPLETED and deadline < requested + duration:
            raise ValueError("a completed record must not expire before its completion")
    if max(requested + duration, deadline) > _LATEST_MS:
        raise ValueError("a time after the year 9999 does not fit")
    takeover = record.on_expiry is OnExpiry.TAKEOVER
    first = _FORMAT << 5 | NUMBERS[record.state] << 3 | takeover << 2 | success << 1 | record.in_quota
    info = record.info
    if record.remembered_until is not None:
        until = (_UNTIL + b"%015d" % round(record.remembered_until * 1000)).decode()
        info = replace(info, operation=info.operation + until)
    about = about_bytes(info)
    header = _HEADER.pack(
        first,
        record.token,
        record.fence.to_bytes(7, "big"),
        record.attempt,
        record.fingerprint,
        requested.to_bytes(6, "big"),
        deadline.to_bytes(6, "big"),
        duration.to_bytes(5, "big"),
        status,
        tid,
        about[:3],
    )
    return header + about[3:] + tail


class Erasure(NamedTuple):
    """The last erasure of a tenant."""

    destroyed: int
    """The highest number of a data key that it destroyed."""
    at: int
    """In microseconds."""

    def covers(self, payload: StoredPayload | None, *, requested_ms: int) -> bool:
        """Return whether it destroyed this payload of a request of that time."""
        if payload is None:
            return False
        by = payload.sealed_by
        return requested_ms * 1000 <= self.at if by is None else by.number <= self.destroyed


def decode_erasure(text: bytes | None) -> Erasure | None:
    """Decode the field `ERASURE` of a tenant's data keys."""
    if text is None:
        return None
    destroyed, _, erased_at = text.partition(b" ")
    return Erasure(whole_number(destroyed), whole_number(erased_at))


def with_erasure(record: Record, erasure: Erasure | None) -> Record:
    """Return this record, marked as erased if its tenant's erasure destroyed its response."""
    if erasure is None or not erasure.covers(record.payload, requested_ms=round(record.requested_at * 1000)):
        return record
    return replace(record, erased=True)


def _long_text(data: bytes) -> bytes:
    """Return this text after its length. Cut one that is too long between two letters, and add "…"."""
    if len(data) > ABOUT_TEXT_BYTES:
        end = ABOUT_TEXT_BYTES - len(_CUT)
        while data[end] & 0xC0 == 0x80:  # in the middle of a letter
            end -= 1
        data = data[:end] + _CUT
    return length_bytes(len(data)) + data


def length_bytes(number: int) -> bytes:
    """Encode a number in as few bytes as it needs, seven bits in each. Most lengths take one byte."""
    if number < 128:
        return _SHORT[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_length(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at this position, and the position after it. Raise `CorruptRecord` if `length_bytes` did not write it.

    Scripts compare encoded payloads byte by byte, so each number has exactly one valid encoding.
    """
    number = data[at]
    if number < 128:
        return number, at + 1
    number, shift, last = number & 127, 7, at + _LENGTH_BYTES - 1
    while data[at := at + 1] > 127:
        if at == last:
            raise CorruptRecord(f"a length in the record in Redis has more than {_LENGTH_BYTES} bytes")
        number |= (data[at] & 127) << shift
        shift += 7
    if data[at] == 0:
        raise CorruptRecord("a length in the record in Redis is padded")
    return number | data[at] << shift, at + 1


@lru_cache(maxsize=64)  # a policy has few durations
def duration(seconds: float) -> bytes:
    """Return this duration in microseconds, as an argument of a script. Raises `ValueError` as `microseconds` does."""
    return b"%d" % microseconds(seconds)


@lru_cache(maxsize=64)
def _bucket_width(keep: float) -> bytes:
    return b"%d" % bucket_width_ms(keep)


def completion(payload: StoredPayload, *, keep: float, remember: float | None = None) -> tuple[bytes, ...]:
    """Return the last arguments of `complete.lua` and `resolve.lua`: two more for a record that outlives its response."""
    arguments = (
        duration(keep),
        b"1" if payload.success else b"0",
        b"%d" % payload.status,
        payload_bytes(payload),
        b"0" if payload.sealed_by is None else b"%d" % payload.sealed_by.number,
        _bucket_width(keep),
    )
    if remember is None:
        return arguments
    longer = duration(remember), _bucket_width(remember)
    return (*arguments, *longer) if remember > keep else arguments


def limits_of(quota: Quota) -> tuple[int | str, int | str, int | str, int | str, int | str]:
    """Return a quota as arguments of a script: an empty text means unlimited, and the window is in microseconds."""
    rate = quota.new_keys
    return (
        "" if quota.records is None else quota.records,
        "" if quota.bytes is None else quota.bytes,
        "" if quota.in_flight is None else quota.in_flight,
        "" if rate is None else rate.count,
        "" if rate is None else max(round(rate.seconds * 1_000_000), 1),
    )
