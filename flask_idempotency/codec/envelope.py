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
import sys
import threading
import zlib
from collections.abc import Mapping
from functools import cache, lru_cache
from types import MappingProxyType, ModuleType
from typing import Any, Final, Protocol
from zlib import crc32

from flask_idempotency.engine.errors import CorruptRecord, NotStorable, ResponseUnavailable
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
            plain = stream.decompress(data, max_bytes + 1)
        except zlib.error as error:
            raise CorruptRecord(f"the envelope cannot be decompressed: {error}") from error
        _check_whole(plain, stream, max_bytes)
        return plain


class Zstd:
    """Zstandard of Python 3.14, or of the package `backports.zstd`. It takes a third of the time of zlib for 2 KB.

    It loads the library at the first use, because few applications need it.
    """

    number = 2

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._local = threading.local()

    def compress(self, data: bytes) -> bytes:
        # A new compressor takes longer than to compress 2 KB with it. One for each thread, because a lock in it that another
        # thread holds at a fork would stay locked. After an error it begins a new frame.
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = _zstd().ZstdCompressor(self._level)
        compressed: bytes = compressor.compress(data, compressor.FLUSH_FRAME)
        return compressed

    def decompress(self, data: bytes, *, max_bytes: int) -> bytes:
        try:
            zstd = _zstd()
        except ImportError as error:
            # The record is sound, so do not report damage: another host can open it.
            raise ResponseUnavailable(
                f"the response is compressed with zstd, and this host cannot read it: {ZSTD_REMEDY}"
            ) from error
        stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        try:
            plain: bytes = stream.decompress(data, max_bytes + 1)
        except zstd.ZstdError as error:
            raise CorruptRecord(f"the envelope cannot be decompressed: {error}") from error
        _check_whole(plain, stream, max_bytes)
        return plain


def _check_whole(plain: bytes, stream: Any, max_bytes: int) -> None:
    """Raise `CorruptRecord` unless this is all that the stream holds.

    A reader unfolds one byte more than allowed: it shows that the data is longer, and the rest stays folded.
    """
    if len(plain) > max_bytes:
        raise CorruptRecord(f"the envelope unfolds to more than {max_bytes} bytes")
    if not stream.eof or stream.unused_data:
        raise CorruptRecord("the envelope's compressed content does not end where it should")


ZSTD_REMEDY: Final = "run pip install 'flask-idempotency[zstd]'"
_WINDOW_LOG: Final = 23
"""A window of 8 MiB. Level 1 takes 512 KiB at most, and a hostile frame could ask for 2 GiB."""


@cache
def _zstd() -> ModuleType:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def zstd_is_installed() -> bool:
    """Return whether this process can read and write zstd."""
    try:
        _zstd()
    except ImportError:
        return False
    return True


COMPRESSIONS: Mapping[str, Compression] = MappingProxyType({"zlib": Zlib(), "zstd": Zstd()})
"""By the name of the option `compression`."""

READERS: Mapping[int, Compression] = MappingProxyType({method.number: method for method in COMPRESSIONS.values()})
"""By the number in an envelope. Keep a reader when you remove its writer."""


VERSION: Final = 1
COMPRESS_ABOVE: Final = 1024
"""A smaller response saves less than half a kilobyte of memory, and costs as much time as one of 2 KB."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Bytes of status line and pairs. Servers and proxies refuse far less."""
MAX_PAIRS: Final = 256
MAX_REASON: Final = 512

_HEADER = 5
_TOMBSTONE = 1
_UNCOUNTED_BYTES = len("201 ") + MAX_REASON + len("\r\n\r\n")
"""The bytes of an uncompressed response that `StoredResponse.byte_size` does not count."""
_FIRST = tuple(bytes((VERSION << 4 | flags,)) for flags in range(16))
"""Byte 0 by its other four bits."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PAIR = re.compile(r"\r\n([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([^\r\n\0]*)")
_STATUS_LINE = re.compile(r"([0-9]{3})(?: ([^\r\n\0]{1,512}))?")


@lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    # An application sends few names, and it chooses them itself.
    return _NAME.fullmatch(name) is not None


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
            if not _is_name(name):
                raise NotStorable(f"{name!r} cannot be the name of a header")
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
        size = result.byte_size
        # `findall` skips what is no pair: then the pairs are shorter than the text.
        if size != len(text) - line.end() + len(body) or len(pairs) > MAX_PAIRS:
            raise CorruptRecord("the envelope holds a malformed header, or too many")
        if stated is not None and (result.status != stated.status or size != stated.byte_size):
            raise CorruptRecord("the record and the response in it differ in status or size")
        return result
