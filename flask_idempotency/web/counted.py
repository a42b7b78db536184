"""A server's input stream that can tell whether somebody has read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Counted:
    """Passes everything on to the stream, and counts what is read.

    Most servers' streams cannot tell where they stand. One that a hook has emptied then looks like an empty body. There
    is no `tell` here that the stream does not have: who finds one may think that it can also seek.
    """

    __slots__ = ("_source", "bytes_read")

    def __init__(self, source: Any) -> None:
        self._source = source
        self.bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        for line in self._source:
            self.bytes_read += len(line)
            yield line

    def __next__(self) -> bytes:
        line: bytes = next(self._source)
        self.bytes_read += len(line)
        return line

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no source yet
            raise AttributeError(name)
        found = getattr(self._source, name)
        reads = name.startswith("read") and name != "readable" and callable(found)
        return self._counting(found) if reads else found

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            got = read(*args, **kwargs)
            self.bytes_read += _byte_size(got)
            return got

        return counting


def _byte_size(got: Any) -> int:
    """Of what `read`, `readlines` or `readinto` has returned."""
    if isinstance(got, list):
        return sum(map(len, got))
    return got if isinstance(got, int) else len(got or b"")
