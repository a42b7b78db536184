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
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from flask_idempotency.engine.errors import CorruptRecord, NotStorable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import StoredPayload, StoredResponse
from flask_idempotency.engine.store import SealContext

_SMALL, _LARGE = (12, 5), (zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL)
_SMALL_BYTES = 8 * 1024
"""Up to here use a window of 4 KiB: Deflate then takes 32 KiB of memory, and the result is no larger. Its usual 256 KiB come
from the kernel page by page, for every response, which costs ten times as much as compressing 2 KB."""


class Compression(Protocol):
    """One algorithm. `number` is 1 to 7; no other algorithm ever gets it."""

    @property
    def number(self) -> int: ...

    def compress(self, data: bytes) -> bytes: ...

    def decompress(self, data: bytes, *, max_bytes: int) -> bytes:
        """Return the plain data. Raises `CorruptRecord` if it is damaged, or longer than `max_bytes`, as a bomb is."""
        ...


class Zlib:
    """Deflate of the standard library. Level 1 takes a third of the time of level 6; the result is a tenth larger."""

    number = 1

    def __init__(self, level: int = 1) -> None:
        self._level = level

    def compress(self, data: bytes) -> bytes:
        window, memory = _SMALL if len(data) <= _SMALL_BYTES else _LARGE
        stream = zlib.compressobj(self._level, zlib.DEFLATED, window, memory)
        return stream.compress(data) + stream.flush()

    def decompress(self, data: bytes, *, max_bytes: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            # Read one byte more than allowed: it shows that the data is longer, and we do not unfold the rest.
            plain = stream.decompress(data, max_bytes + 1)
        except zlib.error as error:
            raise CorruptRecord(f"the envelope cannot be decompressed: {error}") from error
        if len(plain) > max_bytes:
            raise CorruptRecord(f"the envelope unfolds to more than {max_bytes} bytes")
        if not stream.eof or stream.unused_data:
            raise CorruptRecord("the envelope's compressed content does not end where it should")
        return plain


COMPRESSIONS: Mapping[str, Compression] = MappingProxyType({"zlib": Zlib()})
"""By the name of the option `compression`."""

READERS: Mapping[int, Compression] = MappingProxyType({method.number: method for method in COMPRESSIONS.values()})
"""By the number in an envelope. Keep a reader when you remove its writer."""


VERSION: Final = 1
COMPRESS_ABOVE: Final = 1024
"""A smaller response saves little, and compressing it costs a tenth of the store call."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Bytes of status line and pairs. Servers and proxies refuse far less."""
MAX_PAIRS: Final = 256
MAX_REASON: Final = 512

_HEADER = 5
_TOMBSTONE = 1
_UNCOUNTED_BYTES = len("201 ") + MAX_REASON + len("\r\n\r\n")
"""The bytes of an uncompressed response that `StoredResponse.byte_size` does not count."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\r\n\0]")
_STATUS_LINE = re.compile(r"([0-9]{3})(?: ([^\r\n\0]{1,512}))?")


class EnvelopeCodec:
    """Implements `engine.store.Codec`. Stateless and safe to share between threads."""

    def __init__(
        self, *, compression: Compression | None = COMPRESSIONS["zlib"], max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        """Limit a response to `max_bytes` when it is sealed and when it is opened."""
        self._compression = compression
        self._max_bytes = max_bytes

    def prepare(self, key: StorageKey) -> None:
        """Do nothing: an envelope needs no key."""

    def forget(self, key: StorageKey) -> None:
        """Do nothing: an envelope needs no key."""

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        return StoredPayload(self.wrap(result), result.status, result.status < 400, result.byte_size)

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if payload.sealed_by is not None:
            raise CorruptRecord(
                "the response is encrypted, and this application has no key ring: set IDEMPOTENCY_KEY_RING"
            )
        return self.unwrap(payload.data, stated=payload)

    def wrap(self, result: StoredResponse) -> bytes:
        """Return the envelope of this response. Raise `NotStorable` for one that could not be opened again unchanged."""
        if not 0 <= result.status <= 999:
            raise NotStorable(f"the status {result.status} does not have three digits")
        if not result.kept and result.body:
            raise NotStorable("a tombstone has no body")
        if len(result.reason) > MAX_REASON or len(result.metadata) > MAX_PAIRS:
            raise NotStorable(
                f"the reason has more than {MAX_REASON} characters, or there are over {MAX_PAIRS} headers"
            )
        lines = [f"{result.status:03d} {result.reason}" if result.reason else f"{result.status:03d}"]
        for name, value in result.metadata:
            if not _NAME.fullmatch(name):
                raise NotStorable(f"{name!r} cannot be the name of a header")
            lines.append(f"{name}: {value}")
        if any(map(_FORBIDDEN.search, lines)):
            raise NotStorable("the reason or a header contains CR, LF or NUL")
        try:
            head = "\r\n".join(lines).encode("latin-1")
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
        first = bytes((VERSION << 4 | method << 1 | (0 if result.kept else _TOMBSTONE),))
        return first + zlib.crc32(content, zlib.crc32(first)).to_bytes(4, "big") + content

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
        first, checksum, content = data[:1], data[1:_HEADER], data[_HEADER:]
        version, method, tombstone = first[0] >> 4, first[0] >> 1 & 7, first[0] & _TOMBSTONE
        if version != VERSION:
            raise CorruptRecord(f"envelope format {version} is unknown to this release")
        if checksum != zlib.crc32(content, zlib.crc32(first)).to_bytes(4, "big"):
            raise CorruptRecord("the envelope's checksum is wrong")
        if method:
            if method not in READERS:
                raise CorruptRecord(f"compression {method} is unknown to this release")
            content = READERS[method].decompress(content, max_bytes=limit)
        end = content.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
        status_line, *lines = content[: max(end, 0)].decode("latin-1").split("\r\n", MAX_PAIRS + 1)
        body, status = content[end + 4 :], _STATUS_LINE.fullmatch(status_line)
        if end < 0 or status is None or len(lines) > MAX_PAIRS or (body and tombstone):
            raise CorruptRecord("the envelope does not hold a response")
        metadata = list[tuple[str, str]]()
        for line in lines:
            name, separator, value = line.partition(": ")
            if not separator or not _NAME.fullmatch(name) or _FORBIDDEN.search(value):
                raise CorruptRecord("the envelope holds a malformed header")
            metadata.append((name, value))
        result = StoredResponse(int(status[1]), status[2] or "", tuple(metadata), body, kept=not tombstone)
        if stated is not None and (result.status, result.byte_size) != (stated.status, stated.byte_size):
            raise CorruptRecord("the record and the response in it differ in status or size")
        return result
