"""The byte format of a journal entry: the item of a step and its result, compressed, with a checksum.

Format version 3 (`tests/codec/golden` holds examples that every later release must open):

    byte 0      version << 4 | compression << 1 | whether there is a result     compression as in format 1
    bytes 1-4   CRC-32, big-endian, of byte 0 and everything from byte 5
    byte 5 on   compressed as a whole or plain:

        2 bytes     length of the item, big-endian
        item        tagged JSON, empty for a step without one
        result      tagged JSON, to the end; empty if there is none

`flask_idempotency.steps.values` defines the tagged JSON. A kept request has the bytes of `web/kept_requests.py`
there. An encrypted entry is format 2 around this one: see `encryption`.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from flask_idempotency.codec.compression import COMPRESS_ABOVE, COMPRESSIONS, READERS, Compression
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, ResponseUnavailable, RingMismatch
from flask_idempotency.engine.journal import LARGEST_ENTRY, LARGEST_ITEM
from flask_idempotency.engine.model import ERASED, StoredPayload
from flask_idempotency.engine.store import StepContext

VERSION: Final = 3

STEP_ERASED: Final = "the result of this step was erased with all results of its tenant"

_HEADER = 5
_LENGTH = 2
_RESULT = 1
_LARGEST: Final = _LENGTH + LARGEST_ITEM + LARGEST_ENTRY


class StepEnvelopes:
    """Implements `engine.store.StepCodec`. Stateless and safe to share between threads."""

    def __init__(self, *, compression: Compression | None = COMPRESSIONS["zlib"]) -> None:
        self._compression = compression

    def seal(self, item: bytes, result: bytes | None, context: StepContext) -> StoredPayload:
        return StoredPayload(self.wrap(item, result), 0, True, len(item) + len(result or b""))

    def open(self, payload: StoredPayload, context: StepContext) -> tuple[bytes, bytes | None]:
        if payload.sealed_by == ERASED:
            raise ResponseUnavailable(STEP_ERASED)
        if payload.sealed_by is not None:
            raise RingMismatch("the step is encrypted, and this application has no key ring: set IDEMPOTENCY_KEY_RING")
        return self.unwrap(payload.data)

    def wrap(self, item: bytes, result: bytes | None) -> bytes:
        """Return the envelope of this item and result. Raises `NotStorable` if either is too large."""
        if len(item) > LARGEST_ITEM:
            raise NotStorable(f"the item takes {len(item)} bytes; {LARGEST_ITEM} are allowed")
        if result is not None and len(result) > LARGEST_ENTRY:
            raise NotStorable(f"the result takes {len(result)} bytes; {LARGEST_ENTRY} are allowed")
        content = b"%b%b%b" % (len(item).to_bytes(_LENGTH, "big"), item, result or b"")
        method = 0
        if self._compression is not None and len(content) > COMPRESS_ABOVE:
            compressed = self._compression.compress(content)
            if len(compressed) < len(content):
                method, content = self._compression.number, compressed
        first = bytes((VERSION << 4 | method << 1 | (0 if result is None else _RESULT),))
        return b"%b%b%b" % (first, crc32(content, crc32(first)).to_bytes(4, "big"), content)

    def unwrap(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Return the item and the result, None if there is none. Raises `CorruptRecord` unless `wrap` made these bytes."""
        if not _HEADER + _LENGTH <= len(data) <= _HEADER + _LARGEST:
            raise CorruptRecord("the step's envelope is cut short, or longer than any")
        first, content = data[0], data[_HEADER:]
        if first >> 4 != VERSION:
            raise CorruptRecord(f"step format {first >> 4} is unknown to this release")
        if data[1:_HEADER] != crc32(content, crc32(data[:1])).to_bytes(4, "big"):
            raise CorruptRecord("the checksum of the step's envelope is wrong")
        if method := first >> 1 & 7:
            if method not in READERS:
                raise CorruptRecord(f"compression {method} is unknown to this release")
            content = READERS[method].decompress(content, max_bytes=_LARGEST)
        end = _LENGTH + int.from_bytes(content[:_LENGTH], "big")
        item, result = content[_LENGTH:end], content[end:]
        if len(content) < end or (result and not first & _RESULT):
            raise CorruptRecord("the envelope does not hold a step")
        return item, result if first & _RESULT else None
