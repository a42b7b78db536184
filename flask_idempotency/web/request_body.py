"""Where the body of a request is, and what can be wrong with it. `requests.read_body` reads it whole, before the view.

If the body is not complete, that is an error. The guard never fingerprints a part of it. Then too the body is put back: a
request that is only observed goes on.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from dataclasses import field
from typing import IO, Any, Final

from flask import Request
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError, StoreUnavailable
from flask_idempotency.engine.values import valueclass


class CountingStream:
    """Forwards to the server's input stream, and counts the bytes that are read.

    Most servers' streams do not know their position, so one that a hook emptied looks like an empty body. This class adds
    no `tell`: code that finds one may conclude that it can also seek.
    """

    __slots__ = ("_source", "bytes_read")

    def __init__(self, source: Any) -> None:
        self._source = source
        self.bytes_read: int = 0

    def read(self, *args: Any, **kwargs: Any) -> Any:
        got = self._source.read(*args, **kwargs)
        self.bytes_read += len(got or b"")
        return got

    def __iter__(self) -> Iterator[bytes]:
        for line in self._source:
            self.bytes_read += len(line)
            yield line

    def __next__(self) -> bytes:
        line: bytes = next(self._source)
        self.bytes_read += len(line)
        return line

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # during copy.copy() there is no source yet
            raise AttributeError(name)
        found = getattr(self._source, name)
        if not name.startswith("read") or name == "readable" or not callable(found):
            return found

        def counting(*args: Any, **kwargs: Any) -> Any:
            got = found(*args, **kwargs)
            self.bytes_read += _byte_size(got)
            return got

        return counting


def _byte_size(got: Any) -> int:
    """Return the size of what `read`, `readlines` or `readinto` returned."""
    if isinstance(got, list):
        return sum(map(len, got))
    return got if isinstance(got, int) else len(got or b"")


MEMORY_BYTES: Final = 64 * 1024
"""Larger bodies go through a temporary file. Payment bodies are smaller, and a hundred threads may hold one each."""

FORM_TYPES: Final = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})
"""The media types that Werkzeug parses as forms."""

CHUNK_BYTES: Final = 64 * 1024
BODY: Final = "flask_idempotency.body"


class TruncatedBody(IdempotencyError):
    """The client sent less than it announced. The guard responds 400, before any claim."""


class BodyTooLarge(IdempotencyError):
    """The body is longer than the policy allows. The guard responds 413, before any claim."""


class BodyNotKept(StoreUnavailable):
    """No temporary file takes the body. The guard responds 503, before any claim. The message says what the system said."""

    def __init__(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        super().__init__(f"{name}: {error.strerror}" if error.strerror else name)


class BodyConsumed(ConfigurationError):
    """The application read the body before the guard could, and kept no copy. The message names the remedy."""

    def __init__(self) -> None:
        super().__init__(
            "The request body was read before flask_idempotency could fingerprint it, so a changed payload could pass "
            "for a retry. Let the earlier before_request hook read it with request.get_data(), request.get_json() or "
            "request.form, which keep a copy, instead of request.stream, get_data(cache=False) or wsgi.input; and let "
            "it leave uploaded files open."
        )


@valueclass(frozen=True, slots=True)
class Body:
    """Where a request's whole body is. Without a stream it is in `request.form` and `request.files`, or unread."""

    length: int | None
    stream: IO[bytes] | None = None
    parsed: bool = False
    """An earlier hook parsed it as a form. Werkzeug keeps no bytes then."""
    shared: bool = False
    """Another dispatch reads the same stream, and closes it."""
    data: bytes | None = field(default=None, repr=False)
    """All bytes, if the body is in memory and no hook had read from it."""

    @property
    def unread(self) -> bool:
        """Whether its announced length is over the limit. The view may raise the limit and read it, or respond 413."""
        return self.stream is None and not self.parsed

    def close(self) -> None:
        """Close a temporary file now. Call it only if no code reads on: a streaming view may, even after teardown.

        Without this call, the file closes with its last reference.
        """
        if self.stream is not None and not self.shared:
            self.stream.close()


def close_with(response: Response, body: Body) -> None:
    """Close a body with its response, and leave nothing there: some applications share a response between requests."""
    there = weakref.ref(response)

    def close() -> None:
        if (response := there()) is not None:
            # A new list, because Werkzeug iterates over this one now.
            response._on_close = [each for each in response._on_close if each is not close]
        body.close()

    response.call_on_close(close)


def watch_body(request: Request) -> None:
    """Detect from now on if a hook reads from the server's stream, not only from `request.stream`.

    Earlier reads by a WSGI middleware or a hook stay unnoticed if the stream has no position.
    """
    source = request.environ["wsgi.input"]
    # The length last: Werkzeug parses headers for it, and most sources need no counting.
    if "stream" not in request.__dict__ and position_of(source) is None and request.content_length != 0:
        request.environ["wsgi.input"] = CountingStream(source)


def chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield all bytes of this stream from its start, and restore its position."""
    position = stream.tell()
    stream.seek(0)
    while piece := stream.read(CHUNK_BYTES):
        yield piece
    stream.seek(position)


def position_of(stream: IO[bytes] | CountingStream) -> int | None:
    if isinstance(stream, CountingStream):
        return stream.bytes_read
    try:
        return stream.tell()
    except Exception:  # noqa: BLE001 - a middleware's stream may raise anything
        return None
