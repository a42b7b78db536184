"""Ways to make an envelope smaller, and the bounded way back. Each has a number that envelopes carry for ever."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from flask_idempotency.engine.errors import CorruptRecord


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
        return zlib.compress(data, self._level)

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
