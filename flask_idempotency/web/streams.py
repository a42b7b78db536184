"""A copy of a streamed answer, taken while it passes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TypeAlias

from flask_idempotency.engine.errors import LeaseLost


class End(Enum):
    """How a stream ended. Only `EXHAUSTED` means that the whole answer was produced."""

    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    ERROR = "error"


OnEnd: TypeAlias = Callable[[End], None]

Orphans: TypeAlias = "deque[Callable[[], None]]"
"""Ends that a destructor could not tell. Whoever may do I/O takes them off the left and calls them."""


class Tee(Iterator[bytes]):
    """Hands a body on chunk by chunk, and keeps a copy up to a limit.

    `on_end` is told once how it ended: before the end marker leaves, or the last byte of a body of announced length, so
    that what it stores is stored by the time that the client knows the answer to be complete. The one thing it may
    raise is `LeaseLost`, and only of `EXHAUSTED`: the client must not believe this answer, so it gets no end.
    """

    def __init__(
        self,
        source: Iterable[str] | Iterable[bytes],
        *,
        limit: int,
        announced: int | None = None,
        on_end: OnEnd,
        orphans: Orphans,
    ) -> None:
        # Until iter() has worked there is nothing that __del__ should report.
        self.end: End | None = End.ERROR
        self._chunks: Iterator[str | bytes] = iter(source)
        self._source = source
        self._limit = limit
        self._announced = announced
        self._on_end = on_end
        self._orphans = orphans
        self._copy: list[bytes] = []
        self._byte_size = 0
        self._ahead: bytes | None = None
        self._muted = False
        self._lost = False
        self.end = None

    @property
    def over_limit(self) -> bool:
        """Whether more than the limit has passed by; the copy is gone then."""
        return self._byte_size > self._limit

    def copied(self) -> bytes:
        """What has passed by so far; nothing once it is over the limit."""
        return b"".join(self._copy)

    def mute(self) -> None:
        """Another answer has taken this one's place: nobody is told of its end."""
        self._muted = True

    def __iter__(self) -> Tee:
        return self

    def __next__(self) -> bytes:
        data, self._ahead = self._ahead, None
        if data is None:
            data = self._pull()
            if self._byte_size == self._announced:
                self._look_ahead()
        return data

    def close(self) -> None:
        """Close the source first, so that the view's generator has done its last before the end is told."""
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        finally:
            self._ended(End.CLOSED)

    def __del__(self) -> None:
        # A collector may run this while this thread holds any lock, the store's own too: what waits here never wakes.
        if self.end is None and not self._muted:
            self._orphans.append(partial(self._on_end, End.CLOSED))

    def _pull(self) -> bytes:
        if self._lost:
            raise LeaseLost("the claim on this answer was lost while it was being sent")
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self._ended(End.EXHAUSTED)
            raise
        except BaseException:
            self._ended(End.ERROR)
            raise
        data = chunk.encode() if isinstance(chunk, str) else chunk
        self._keep(data)
        return data

    def _look_ahead(self) -> None:
        # No end marker follows a body of announced length: these bytes are the end, so they wait until it is told.
        with suppress(StopIteration):
            self._ahead = self._pull()

    def _keep(self, data: bytes) -> None:
        self._byte_size += len(data)
        if self.over_limit:
            self._copy.clear()
        else:
            self._copy.append(data)

    def _ended(self, end: End) -> None:
        if self.end is None:
            self.end = end
            if not self._muted:
                self._tell(end)

    def _tell(self, end: End) -> None:
        try:
            self._on_end(end)
        except LeaseLost:
            self._lost = True
            raise
