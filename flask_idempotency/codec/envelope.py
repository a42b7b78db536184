"""The form in which a result is stored.

Format version 1 (`tests/codec/golden` holds examples that every later release must open):

    byte 0      version << 4 | compression << 1 | tombstone     compression is a number of `READERS`, 0 is none
    bytes 1-4   CRC-32, big-endian, of byte 0 and everything from byte 5
    byte 5 on   the answer, compressed as a whole or plain:

        201 Made just now CRLF          status; a space and the reason only where there is one
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
"""Deflate's usual 256 KiB of working memory come from the kernel, page by page, for every answer: ten times the cost of
compressing 2 KB. With a window of 4 KiB it takes 32 KiB, and answers of this size come out no larger."""


class Compression(Protocol):
    """One algorithm. `number` is 1 to 7 and never given to another."""

    @property
    def number(self) -> int: ...

    def compress(self, data: bytes) -> bytes: ...

    def decompress(self, data: bytes, *, max_bytes: int) -> bytes:
        """What was compressed. `CorruptRecord` when damaged or longer: a few bytes may unfold to gigabytes."""
        ...


class Zlib:
    """Deflate as the standard library has it. Level 1 takes a third of the time of 6 and is a tenth larger."""

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
            # One byte more than allowed shows that there is more, without unfolding the rest.
            plain = stream.decompress(data, max_bytes + 1)
        except zlib.error as error:
            raise CorruptRecord(f"the envelope cannot be decompressed: {error}") from error
        if len(plain) > max_bytes:
            raise CorruptRecord(f"the envelope unfolds to more than {max_bytes} bytes")
        if not stream.eof or stream.unused_data:
            raise CorruptRecord("the envelope's compressed content does not end where it should")
        return plain


COMPRESSIONS: Mapping[str, Compression] = MappingProxyType({"zlib": Zlib()})
"""By the name that settings use."""

READERS: Mapping[int, Compression] = MappingProxyType({method.number: method for method in COMPRESSIONS.values()})
"""By the number in an envelope. A reader stays when its writer goes."""


VERSION: Final = 1
COMPRESS_ABOVE: Final = 1024
"""Below this there is little to save, and compressing costs a tenth of what the store call costs."""

LARGEST_HEAD: Final = 64 * 1024
"""Bytes of status line and pairs. Servers and proxies refuse far less."""
MOST_PAIRS: Final = 256
LONGEST_REASON: Final = 512

_HEADER = 5
_TOMBSTONE = 1
_BESIDE_BYTE_SIZE = len("201 ") + LONGEST_REASON + len("\r\n\r\n")
"""What an answer takes more, before it is compressed, than `StoredResponse.byte_size` says."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\r\n\0]")
_STATUS_LINE = re.compile(r"([0-9]{3})(?: ([^\r\n\0]{1,512}))?")


class EnvelopeCodec:
    """Implements `engine.store.Codec`. Stateless and safe to share between threads."""

    def __init__(
        self, *, compression: Compression | None = COMPRESSIONS["zlib"], max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        """`max_bytes` bounds an answer in both directions: nothing is sealed that `open` would take for a bomb."""
        self._compression = compression
        self._max_bytes = max_bytes

    def prepare(self, key: StorageKey) -> None:
        """Nothing is needed: the envelope is not encrypted."""

    def forget(self, key: StorageKey) -> None:
        """There is nothing to forget."""

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        return StoredPayload(self.wrap(result), result.status, result.status < 400, result.byte_size)

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if payload.sealed_by is not None:
            raise CorruptRecord(
                "the answer is encrypted, and this application has no key ring: set IDEMPOTENCY_KEY_RING"
            )
        return self.unwrap(payload.data, stated=payload)

    def wrap(self, result: StoredResponse) -> bytes:
        """Return the envelope of this response. Raise `NotStorable` for one that could not be opened again unchanged."""
        if not 0 <= result.status <= 999:
            raise NotStorable(f"a status has three digits, and {result.status} has not")
        if not result.kept and result.body:
            raise NotStorable("a tombstone has no body")
        if len(result.reason) > LONGEST_REASON or len(result.metadata) > MOST_PAIRS:
            raise NotStorable(
                f"the reason has more than {LONGEST_REASON} characters, or there are over {MOST_PAIRS} headers"
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
        if len(head) > LARGEST_HEAD:
            raise NotStorable(f"the headers take {len(head)} bytes; {LARGEST_HEAD} are allowed")
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
        """The result in this envelope. Raises `CorruptRecord` unless it is exactly what `wrap` once made.

        `stated` is what stands beside the envelope. It unfolds to no more than the size there, and has that size and status.
        """
        if len(data) < _HEADER:
            raise CorruptRecord("the envelope is cut short")
        limit = self._max_bytes
        if stated is not None:
            limit = min(limit, max(stated.byte_size, 0) + _BESIDE_BYTE_SIZE)
        if len(data) > _HEADER + limit:
            raise CorruptRecord("the envelope is longer than the record says")
        first, checksum, content = data[:1], data[1:_HEADER], data[_HEADER:]
        version, method, tombstone = first[0] >> 4, first[0] >> 1 & 7, first[0] & _TOMBSTONE
        if version != VERSION:
            raise CorruptRecord(f"envelope format {version} is not known to this release")
        if checksum != zlib.crc32(content, zlib.crc32(first)).to_bytes(4, "big"):
            raise CorruptRecord("the envelope's checksum is wrong")
        if method:
            if method not in READERS:
                raise CorruptRecord(f"compression {method} is not known to this release")
            content = READERS[method].decompress(content, max_bytes=limit)
        end = content.find(b"\r\n\r\n", 0, LARGEST_HEAD + 4)
        status_line, *lines = content[: max(end, 0)].decode("latin-1").split("\r\n", MOST_PAIRS + 1)
        body, status = content[end + 4 :], _STATUS_LINE.fullmatch(status_line)
        if end < 0 or status is None or len(lines) > MOST_PAIRS or (body and tombstone):
            raise CorruptRecord("the envelope does not hold a response")
        metadata = list[tuple[str, str]]()
        for line in lines:
            name, separator, value = line.partition(": ")
            if not separator or not _NAME.fullmatch(name) or _FORBIDDEN.search(value):
                raise CorruptRecord("the envelope holds a malformed header")
            metadata.append((name, value))
        result = StoredResponse(int(status[1]), status[2] or "", tuple(metadata), body, kept=not tombstone)
        if stated is not None and (result.status, result.byte_size) != (stated.status, stated.byte_size):
            raise CorruptRecord("the record and the response in it have not the same status and size")
        return result
