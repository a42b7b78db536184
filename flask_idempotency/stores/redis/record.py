"""A record as one string: 61 bytes of header, whom it is about, and what came of it.

     0     1  format (high four bits), state (two), taken over when lapsed (one), success (one)
     1    16  token
    17     7  fence
    24     1  attempt, never above 255
    25    17  fingerprint
    42     6  requested_at   ┐
    48     6  deadline       │ milliseconds, big-endian
    54     5  duration       ┘
    59     2  status
    61   3+n  about: length, then tenant, principal, method and operation, each after its length
          m   completed: byte_size and the payload; quarantined: the reason; processing: nothing

`lua/record.lua` writes what is read here. One string, because a hash of the same fields takes half as much again, and
because a string of which half is there cannot exist.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.record import About, OnLapse, Payload, Record, State

TOKEN_BYTES = 16
FINGERPRINT_BYTES = 17
ABOUT_TEXT_BYTES = 65536
"""What fits of each text about a request. A principal is the application's and may be a whole token or worse: for an
auditor its beginning will do, and to refuse the payment for its sake would not."""

_CUT = "…".encode()
_FORMAT = 1
_HEADER = Struct(">B16s7sB17s6s6s5sH3s")
_SHORT = [bytes((number,)) for number in range(128)]
_STATES = {1: State.PROCESSING, 2: State.COMPLETED, 3: State.QUARANTINED}
_NUMBERS = {state: number for number, state in _STATES.items()}


def about_bytes(about: About) -> bytes:
    """As it stands in a record, its length before it. A text that is too long is cut, and ends in "…" then."""
    fields = b"".join(map(_text, _texts(about)))
    return len(fields).to_bytes(3, "big") + fields


def payload_bytes(payload: Payload) -> bytes:
    """The part of a payload that scripts do not look at."""
    return _length(payload.byte_size) + payload.data


def reason_of(data: bytes) -> str:
    """Why a record is quarantined. Raises `CorruptRecord` for what this release did not write."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("the reason of the quarantine in Redis is not text") from error


def decode(data: bytes, *, now: float) -> Record:
    """The record that these bytes are. Raises `CorruptRecord` for what this release did not write."""
    try:
        return _decode(data, now)
    except (ValueError, IndexError, KeyError) as error:
        raise CorruptRecord("the bytes in Redis are not a record") from error


def encode(record: Record) -> bytes:
    """The bytes that make `decode` tell this record again, its times to the millisecond.

    Raises `ValueError` for one that does not fit: nothing is cut or rounded down here to make it.
    """
    fits = len(record.token) == TOKEN_BYTES and len(record.fingerprint) == FINGERPRINT_BYTES
    if not fits or any(len(text.encode("utf-8", "surrogatepass")) > ABOUT_TEXT_BYTES for text in _texts(record.about)):
        raise ValueError("a token, a fingerprint or a text does not fit")
    try:
        return _encode(record)
    except (OverflowError, StructError) as error:
        raise ValueError("a number does not fit") from error


def _encode(record: Record) -> bytes:
    payload, requested = record.payload, round(record.requested_at * 1000)
    success, duration, status, tail = False, 0, 0, b""
    if record.state is State.COMPLETED:
        if payload is None or record.completed_at is None or payload.byte_size < 0:
            raise ValueError("a completed record has a result, and a time")
        success, status, tail = payload.success, payload.status, payload_bytes(payload)
        duration = round(record.completed_at * 1000) - requested
    elif record.state is State.QUARANTINED:
        tail = record.reason.encode()
    first = _FORMAT << 4 | _NUMBERS[record.state] << 2 | (record.on_lapse is OnLapse.TAKEOVER) << 1 | success
    about = about_bytes(record.about)
    header = _HEADER.pack(
        first,
        record.token,
        record.fence.to_bytes(7, "big"),
        record.attempt,
        record.fingerprint,
        requested.to_bytes(6, "big"),
        round(record.deadline * 1000).to_bytes(6, "big"),
        duration.to_bytes(5, "big"),
        status,
        about[:3],
    )
    return header + about[3:] + tail


def _decode(data: bytes, now: float) -> Record:
    if len(data) < _HEADER.size:
        raise CorruptRecord("the record in Redis is cut short")
    first, token, fence, attempt, fingerprint, requested, ends, took, status, about_size = _HEADER.unpack_from(data)
    if first >> 4 != _FORMAT:
        raise CorruptRecord(f"record format {first >> 4} is not known to this release")
    state = _STATES[first >> 2 & 3]
    tail = _HEADER.size + int.from_bytes(about_size, "big")
    requested_ms, deadline = int.from_bytes(requested, "big"), int.from_bytes(ends, "big") / 1000
    completed_at = payload = None
    reason = ""
    if state is State.COMPLETED:
        completed_at = (requested_ms + int.from_bytes(took, "big")) / 1000
        byte_size, start = _read_length(data, tail)
        payload = Payload(data[start:], status, first & 1 == 1, byte_size)
    elif state is State.QUARANTINED:
        reason = reason_of(data[tail:])
    # By position: this is on every replay's path, and names cost a microsecond.
    return Record(
        state,
        token,
        int.from_bytes(fence, "big"),
        attempt,
        fingerprint,
        OnLapse.TAKEOVER if first & 2 else OnLapse.QUARANTINE,
        _about(data, tail),
        requested_ms / 1000,
        deadline,
        deadline - now,
        completed_at,
        payload,
        reason,
    )


def _about(data: bytes, end: int) -> About:
    at = _HEADER.size
    texts = []
    for _ in range(4):
        size, start = _read_length(data, at)
        at = start + size
        texts.append(data[start:at].decode("utf-8", "surrogatepass"))
    if at != end:
        raise CorruptRecord("the record in Redis is not put together as this release does it")
    return About(*texts)


def _texts(about: About) -> tuple[str, str, str, str]:
    return about.tenant, about.principal, about.method, about.operation


def _text(text: str) -> bytes:
    # A tenant or a principal may be any str, lone surrogates included.
    data = text[: ABOUT_TEXT_BYTES + 1].encode("utf-8", "surrogatepass")
    if len(data) > ABOUT_TEXT_BYTES:
        data = _cut(data)
    return _length(len(data)) + data


def _cut(data: bytes) -> bytes:
    end = ABOUT_TEXT_BYTES - len(_CUT)
    while data[end] & 0xC0 == 0x80:  # in the middle of a letter
        end -= 1
    return data[:end] + _CUT


def _length(number: int) -> bytes:
    """A number in as few bytes as it needs, seven bits in each: most lengths here take one."""
    if number < 128:
        return _SHORT[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place and where it ends."""
    number = data[at]
    if number < 128:
        return number, at + 1
    number, shift = number & 127, 7
    while data[at := at + 1] > 127:
        number |= (data[at] & 127) << shift
        shift += 7
    return number | data[at] << shift, at + 1
