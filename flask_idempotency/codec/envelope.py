"""The byte format of a stored response: status, headers and body, compressed, with a checksum.

Format version 1 (`tests/codec/golden` holds examples that every later release must open):

    byte 0      version << 4 | compression << 1 | tombstone     compression is a number of `READERS`, 0 is none
    bytes 1-4   CRC-32, big-endian, of byte 0 and everything from byte 5
    byte 5 on   the response, compressed as a whole or plain:

        201 Made just now CRLF          status; a space and the reason, if there is one
        Content-Type: text/plain CRLF   any number of pairs, in order
        CRLF
        body, to the end

The checksum finds damage, not malice: an attacker who can write to the store can write a checksum too. Encryption finds
that.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final
from zlib import crc32

from flask_idempotency.codec.compression import COMPRESS_ABOVE, COMPRESSIONS, READERS, Compression
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, RingMismatch
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import SealContext, StoredPayload, StoredResponse

if TYPE_CHECKING:
    from flask_idempotency.codec.step_envelope import StepEnvelopes

VERSION: Final = 1

MAX_HEAD_BYTES: Final = 64 * 1024
"""Bytes of status line and pairs. Servers and proxies refuse far less."""
MAX_PAIRS: Final = 256
MAX_REASON: Final = 512

_HEADER = 5
_TOMBSTONE = 1
_UNCOUNTED_BYTES = len("201 ") + MAX_REASON + len("\r\n\r\n")
"""The bytes of an uncompressed response that `byte_size_of` does not count."""
_FIRST = tuple(bytes((VERSION << 4 | flags,)) for flags in range(16))
"""Byte 0 by its other four bits."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PAIR = re.compile(r"\r\n([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([^\r\n\0]*)")
_STATUS_LINE = re.compile(r"([0-9]{3})(?: ([^\r\n\0]{1,512}))?")


_name_of = lru_cache(maxsize=256)(_NAME.fullmatch)
"""An application sends few names, and it chooses them itself."""


def byte_size_of(result: StoredResponse) -> int:
    """Return the bytes that a quota counts for this response, before any encoding."""
    size = len(result.body)
    for name, value in result.metadata:
        size += len(name) + len(value) + 4
    return size


class EnvelopeCodec:
    """Implements `engine.store.Codec`. Stateless and safe to share between threads."""

    def __init__(
        self, *, compression: Compression | None = COMPRESSIONS["zlib"], max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        """Limit a response to `max_bytes` when it is sealed and when it is opened."""
        self._compression = compression
        self._max_bytes = max_bytes

    @cached_property
    def steps(self) -> StepEnvelopes:
        """Seals and opens what journals keep."""
        from flask_idempotency.codec.step_envelope import StepEnvelopes  # for the applications that have steps

        return StepEnvelopes(compression=self._compression)

    def prepare(self, key: StorageKey) -> None:
        """Do nothing: an envelope needs no key."""

    def forget(self, key: StorageKey) -> None:
        """Do nothing: an envelope needs no key."""

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        return StoredPayload(self.wrap(result), result.status, result.status < 400, byte_size_of(result))

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if payload.sealed_by is not None:
            raise RingMismatch(
                "the response is encrypted, and this application has no key ring: set IDEMPOTENCY_KEY_RING"
            )
        return self.unwrap(payload.data, stated=payload)

    def wrap(self, result: StoredResponse) -> bytes:
        """Return the envelope of this response. Raise `NotStorable` for one that could not be opened again unchanged."""
        status, reason, metadata = result.status, result.reason, result.metadata
        if not 0 <= status <= 999:
            raise NotStorable(f"the status {status} does not have three digits")
        if not result.kept and result.body:
            raise NotStorable("a tombstone has no body")
        if len(reason) > MAX_REASON or len(metadata) > MAX_PAIRS:
            raise NotStorable(
                f"the reason has more than {MAX_REASON} characters, or there are over {MAX_PAIRS} headers"
            )
        text = f"{status:03d} {reason}" if reason else f"{status:03d}"
        for name, value in metadata:
            if _name_of(name) is None:
                raise NotStorable("the name of a header contains a character that no name has")
            text += f"\r\n{name}: {value}"
        # Each pair has brought one CR and one LF. Any other comes from a value or the reason.
        if text.count("\r") != len(metadata) or text.count("\n") != len(metadata) or "\0" in text:
            raise NotStorable("the reason or a header contains CR, LF or NUL")
        try:
            head = text.encode("latin-1")
        except UnicodeEncodeError as error:
            raise NotStorable("the reason or a header contains a character that HTTP cannot carry") from error
        if len(head) > MAX_HEAD_BYTES:
            raise NotStorable(f"the headers take {len(head)} bytes; {MAX_HEAD_BYTES} are allowed")
        content = b"%b\r\n\r\n%b" % (head, result.body)
        if len(content) > self._max_bytes:
            raise NotStorable(f"the response takes {len(content)} bytes; {self._max_bytes} are allowed")
        method = 0
        if self._compression is not None and len(content) > COMPRESS_ABOVE:
            compressed = self._compression.compress(content)
            if len(compressed) < len(content):
                method, content = self._compression.number, compressed
        first = _FIRST[method << 1 | (0 if result.kept else _TOMBSTONE)]
        return b"%b%b%b" % (first, crc32(content, crc32(first)).to_bytes(4, "big"), content)

    def unwrap(self, data: bytes, *, stated: StoredPayload | None = None) -> StoredResponse:
        """Return the response in this envelope. Raises `CorruptRecord` unless `wrap` once made exactly these bytes.

        `stated` has the facts beside the envelope. The response must have its status and size, and unfolds to no more.
        """
        if len(data) < _HEADER:
            raise CorruptRecord("the envelope is cut short")
        limit = self._max_bytes
        if stated is not None:
            limit = min(limit, max(stated.byte_size, 0) + _UNCOUNTED_BYTES)
        if len(data) > _HEADER + limit:
            raise CorruptRecord("the envelope is longer than the record says")
        first, content = data[0], data[_HEADER:]
        if first >> 4 != VERSION:
            raise CorruptRecord(f"envelope format {first >> 4} is unknown to this release")
        if data[1:_HEADER] != crc32(content, crc32(data[:1])).to_bytes(4, "big"):
            raise CorruptRecord("the envelope's checksum is wrong")
        if method := first >> 1 & 7:
            if method not in READERS:
                raise CorruptRecord(f"compression {method} is unknown to this release")
            content = READERS[method].decompress(content, max_bytes=limit)
        end = content.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
        text, body = content[: max(end, 0)].decode("latin-1"), content[end + 4 :]
        line = _STATUS_LINE.match(text)
        if end < 0 or line is None or (body and first & _TOMBSTONE):
            raise CorruptRecord("the envelope does not hold a response")
        pairs: list[tuple[str, str]] = _PAIR.findall(text, line.end())
        result = StoredResponse(int(line[1]), line[2] or "", tuple(pairs), body, kept=not first & _TOMBSTONE)
        size = byte_size_of(result)
        # `findall` skips what is no pair: then the pairs are shorter than the text.
        if size != len(text) - line.end() + len(body) or len(pairs) > MAX_PAIRS:
            raise CorruptRecord("the envelope holds a malformed header, or too many")
        if stated is not None and (result.status != stated.status or size != stated.byte_size):
            raise CorruptRecord("the record and the response in it differ in status or size")
        return result
