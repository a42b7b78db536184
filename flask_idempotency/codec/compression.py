"""Ways to make an envelope smaller, and the bounded way back. Each has a number that envelopes carry for ever."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from flask_idempotency.engine.errors import CorruptRecord

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
