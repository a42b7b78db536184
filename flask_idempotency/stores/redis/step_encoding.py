"""Encode a journal as one hash: a field for each step, named by its id, and a field without a name for the whole.

Of the whole, 31 bytes:

     0     6  requested_at of the record in ms: another life of the key has another journal
     6     7  fence of the claim that wrote last
    13     4  number of that write
    17     5  bytes of all payloads, as quotas count them
    22     2  entries with effects
    24     2  entries
    26     2  place of the next entry
    28     1  "1" if a plain step is in doubt, else "0"
    29     2  sum of the bytes before, so that a flipped bit is found

Of a step:

     0     1  flags: finished (128), in line (64), kept (32), has a payload (16), success (8), effects (two bits)
     1     7  fence of the claim that entered it
     8     2  place: entries that began at the same time follow in this order
    10     7  began  ┐
    17     7  finished, 0 before that  │ microseconds
    24     6  took   ┘
    30     5  size
    35     2  sum of the bytes before
    37     4  CRC-32 of the id, the flags and what follows
    41        digest and name, each after its length; then the payload's status in two bytes, and the payload as
              `encoding.py` writes it

Scripts write the numbers and both sums. Python writes the flags, the CRC and what follows, and scripts never look into that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.journal import Effects, Entry, Journal, StepState
from flask_idempotency.engine.model import LATEST
from flask_idempotency.stores.redis.encoding import (
    decode_erasure,
    length_bytes,
    payload_bytes,
    read_length,
    read_payload,
)

FENCE_BYTES: Final = 7
ID_BYTES: Final = 12
_HEAD: Final = 37
_BODY: Final = _HEAD + 4
_FINISHED, _IN_LINE, _KEPT, _HAS_PAYLOAD, _SUCCESS = 128, 64, 32, 16, 8
_KINDS: Final[tuple[Effects, ...]] = ("plain", "deduplicated", "transactional", "pure")
_LARGEST_SIZE: Final = 2**32
"""A larger size counts as this one, so that the sum of a journal fits five bytes."""
_LONGEST_TOOK: Final = 2**47
"""Microseconds, about four years. A longer duration is stored as this one."""


def fence_bytes(fence: int) -> bytes:
    return fence.to_bytes(FENCE_BYTES, "big")


def step_arguments(entry: Entry) -> tuple[bytes, ...]:
    """Return the five arguments that `lib/step.lua` takes for an entry. Raise `ValueError` if a value does not fit."""
    if len(entry.id) != ID_BYTES:
        raise ValueError(f"a step's id has {ID_BYTES} bytes, not {len(entry.id)}")
    payload = entry.payload
    took = min(max(round(entry.took * 1_000_000), 0), _LONGEST_TOOK)
    size = 0 if payload is None else min(max(payload.byte_size, 0), _LARGEST_SIZE)
    number = 0 if payload is None or payload.sealed_by is None else payload.sealed_by.number
    # Bytes alone: `words` then has nothing to do.
    return entry.id, b"%d" % took, b"%d" % size, b"%d" % number, step_bytes(entry)


def step_bytes(entry: Entry) -> bytes:
    """Encode what Python alone reads of an entry: its flags, the CRC and what follows."""
    payload, name = entry.payload, entry.name.encode()
    flags = (
        _FINISHED * (entry.state is StepState.FINISHED)
        | _IN_LINE * entry.in_line
        | _KEPT * entry.kept
        | _HAS_PAYLOAD * (payload is not None)
        | _SUCCESS * (payload is not None and payload.success)
        | _KINDS.index(entry.effects)
    )
    body = length_bytes(len(entry.digest)) + entry.digest + length_bytes(len(name)) + name
    if payload is not None:
        body += payload.status.to_bytes(2, "big") + payload_bytes(payload)
    first = bytes((flags,))
    return first + _crc(entry.id, first, body) + body


def decode_journal(found: Sequence[Any]) -> Journal:
    """Decode what `read_steps.lua` has found. Raise `CorruptRecord` if an entry is damaged."""
    complete, requested_ms, erased_at, fence, write, fields = found
    erasure, entries = decode_erasure(erased_at), decode_entries(fields)
    return Journal(
        tuple(entries),
        int.from_bytes(fence, "big"),
        write,
        bool(complete),
        erasure is not None and any(erasure.covers(entry.payload, requested_ms=requested_ms) for entry in entries),
    )


def decode_entries(fields: Sequence[bytes]) -> list[Entry]:
    """Decode the entries among these fields and values, in the order in which they began."""
    found = [
        (entry.began_at, data[8:10], entry)
        for id, data in zip(fields[::2], fields[1::2], strict=True)
        if id
        for entry in (decode_entry(id, data),)
    ]
    found.sort(key=lambda each: each[:2])
    return [entry for *_, entry in found]


def decode_entry(id: bytes, data: bytes) -> Entry:
    """Decode one entry. Raise `CorruptRecord` if this release did not write these bytes under this id."""
    if len(data) < _BODY or sum(data[: _HEAD - 2]).to_bytes(2, "big") != data[_HEAD - 2 : _HEAD]:
        raise CorruptRecord("an entry of the journal in Redis is damaged")
    if data[_HEAD:_BODY] != _crc(id, data[:1], data[_BODY:]):
        raise CorruptRecord("an entry of the journal in Redis does not have its checksum")
    flags = data[0]
    began, finished = int.from_bytes(data[10:17], "big"), int.from_bytes(data[17:24], "big")
    if max(began, finished) > LATEST * 1_000_000:
        raise CorruptRecord("an entry of the journal in Redis has a time after the year 9999")
    try:
        size, at = read_length(data, _BODY)
        digest, at = data[at : at + size], at + size
        size, at = read_length(data, at)
        name, at = data[at : at + size].decode(), at + size
        payload = None
        if flags & _HAS_PAYLOAD:
            status = int.from_bytes(data[at : at + 2], "big")
            payload = read_payload(data, at + 2, status, success=bool(flags & _SUCCESS))
    except (ValueError, IndexError) as error:
        raise CorruptRecord("an entry of the journal in Redis cannot be read") from error
    return Entry(
        id,
        name,
        _KINDS[flags & 3],
        StepState.FINISHED if flags & _FINISHED else StepState.BEGUN,
        bool(flags & _IN_LINE),
        digest,
        payload,
        bool(flags & _KEPT),
        int.from_bytes(data[24:30], "big") / 1_000_000,
        int.from_bytes(data[1:8], "big"),
        began / 1_000_000,
        finished / 1_000_000 if flags & _FINISHED else None,
    )


def _crc(id: bytes, flags: bytes, body: bytes) -> bytes:
    return crc32(body, crc32(id + flags)).to_bytes(4, "big")
