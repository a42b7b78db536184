"""Compress stored responses and step results, and read what any release has compressed.

An envelope names its compression by a number, so records of hosts with different settings stay readable.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeAlias

from flask_idempotency.engine.errors import CorruptRecord, ResponseUnavailable

_LEVEL = 1
"""Deflate takes a third of the time of level 6; the result is a tenth larger."""
_SMALL, _LARGE = (12, 5), (zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL)
_SMALL_BYTES = 8 * 1024
"""Up to here use a window of 4 KiB: Deflate then takes 32 KiB of memory, and the result is no larger. Its usual 256 KiB come
from the kernel page by page, for every response, which costs ten times as much as compressing 2 KB."""


class Zlib:
    """Deflate of the standard library."""

    number = 1

    def compress(self, data: bytes) -> bytes:
        window, memory = _SMALL if len(data) <= _SMALL_BYTES else _LARGE
        stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, window, memory)
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

    def __init__(self) -> None:
        self._local = threading.local()

    def compress(self, data: bytes) -> bytes:
        # A new compressor takes longer than to compress 2 KB with it. One for each thread, because a lock in it that another
        # thread holds at a fork would stay locked. After an error it begins a new frame.
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = _zstd().ZstdCompressor(_LEVEL)
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


Compression: TypeAlias = Zlib | Zstd
"""One algorithm. Its `number` is 1 to 7; no other algorithm ever gets it. `decompress` returns the plain data, and raises
`CorruptRecord` if it is damaged, or longer than `max_bytes`, as a bomb is."""

COMPRESSIONS: Mapping[str, Compression] = MappingProxyType({"zlib": Zlib(), "zstd": Zstd()})
"""By the name of the option `compression`."""

READERS: Mapping[int, Compression] = MappingProxyType({method.number: method for method in COMPRESSIONS.values()})
"""By the number in an envelope. Keep a reader when you remove its writer."""

COMPRESS_ABOVE: Final = 1024
"""A smaller text saves less than half a kilobyte of memory, and costs as much time as one of 2 KB."""
