"""Read the whole body of a request before the view, and put it back unread.

If the body is not complete, that is an error. The guard never fingerprints a part of it. Then too the body is put back: a
request that is only observed goes on.
"""

from __future__ import annotations

import errno
import io
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from tempfile import TemporaryFile
from typing import IO, Any, Final, cast

from flask import Request
from werkzeug.exceptions import ClientDisconnected, HTTPException, RequestEntityTooLarge
from werkzeug.wrappers import Response
from werkzeug.wsgi import LimitedStream

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

_CHUNK: Final = 64 * 1024
_NAME: Final = "flask_idempotency.body"


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


class Closing:
    """Closes a body with its response, and removes itself there: some applications share a response between requests."""

    def __init__(self, body: Body, response: Response) -> None:
        self._body = body
        self._response = weakref.ref(response)
        response.call_on_close(self)

    def __call__(self) -> None:
        response = self._response()
        if response is not None:
            # A new list, because Werkzeug iterates over this one now.
            response._on_close = response._on_close.copy()
            response._on_close.remove(self)
        self._body.close()


def watch_body(request: Request) -> None:
    """Detect from now on if a hook reads from the server's stream, not only from `request.stream`.

    Earlier reads by a WSGI middleware or a hook stay unnoticed if the stream has no position.
    """
    source = request.environ["wsgi.input"]
    # The length last: Werkzeug parses headers for it, and most sources need no counting.
    if "stream" not in request.__dict__ and _position(source) is None and request.content_length != 0:
        request.environ["wsgi.input"] = CountingStream(source)


def read_body(request: Request, *, most: int | None = None) -> Body:
    """Read the whole body, once per `Request` however often you call this. A nested dispatch reads its own.

    Afterwards the view finds it in `request.stream` and `wsgi.input` as if it were unread. A body whose announced length is
    over the application's limit is not read: the view may raise the limit, or respond 413.

    If it raises, the body is as it was before, and its stream fails again where it failed.

    Raises `BodyTooLarge` for more than `most` bytes, without reading if the length was announced. Raises `TruncatedBody`,
    `BodyConsumed`, `BodyNotKept`, and Werkzeug's `RequestEntityTooLarge` for a chunked body over the limit.
    """
    body: Body | None = request.__dict__.get(_NAME)
    if body is not None:
        return body
    if most is not None and (request.content_length or 0) > most:
        raise BodyTooLarge
    if "form" in request.__dict__ or getattr(request, "_cached_data", None) is not None:
        body = _kept_by_a_hook(request)
    if body is None and _NAME in request.environ:
        body = _shared(request)
    if body is None:
        body = _read_announced(request) or _read(request, most)
    if most is not None and (body.length or 0) > most:
        raise BodyTooLarge
    request.__dict__[_NAME] = request.environ[_NAME] = body
    return body


def chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield all bytes of this stream from its start, and restore its position."""
    position = stream.tell()
    stream.seek(0)
    while piece := stream.read(_CHUNK):
        yield piece
    stream.seek(position)


def _kept_by_a_hook(request: Request) -> Body | None:
    cached: bytes | None = getattr(request, "_cached_data", None)
    # get_data() after a form was parsed caches b"", whose digest would not cover the form.
    if "form" in request.__dict__ and request.mimetype in FORM_TYPES and not cached:
        return Body(length=request.content_length, parsed=True)
    if cached is None:
        return None
    stream = request.__dict__.get("stream")
    if stream is not None and _is_servers(stream, request):
        if (_position(stream) or 0) > len(cached):
            raise BodyConsumed
        _check_length(request.content_length, len(cached))
    return Body(length=len(cached), stream=io.BytesIO(cached))


def _shared(request: Request) -> Body | None:
    """Return the body of an outer dispatch whose environ, with its stream, was copied. It is compared whole, even if read.

    None if the copy has another stream or length: then the view sees another body.
    """
    body: Body | None = request.environ.get(_NAME)
    if body is None or body.stream is None or body.stream is not request.environ["wsgi.input"]:
        return None
    # Werkzeug reads a terminated stream to its end, whatever Content-Length says.
    same = "wsgi.input_terminated" in request.environ or request.content_length == body.length
    return Body(body.length, body.stream, shared=True) if same else None


def _read_announced(request: Request) -> Body | None:
    """Do what `_read` does for the usual request: a short body of announced length that no hook has touched.

    None for any other, which is then as it was before.
    """
    environ = request.environ
    announced, source = environ.get("CONTENT_LENGTH", ""), environ["wsgi.input"]
    if not (announced.isdecimal() and announced.isascii() and len(announced) <= 5):
        return None
    length = int(announced)
    if not 0 < length <= MEMORY_BYTES or "stream" in request.__dict__ or "HTTP_TRANSFER_ENCODING" in environ:
        return None
    limit = request.max_content_length
    if _position(source) != 0 or (limit is not None and length > limit):
        return None
    data = more = b""
    try:
        data = source.read(length)
        while len(data) < length and (piece := source.read(length - len(data))):
            data += piece
        # Werkzeug reads a terminated stream to its end, whatever Content-Length says. A middleware that unzips has more.
        if "wsgi.input_terminated" in environ:
            more = source.read(_CHUNK)
    except Exception as error:
        environ["wsgi.input"] = _Resumed(io.BytesIO(data), source, error=error)
        _refuse_lost(error)
        raise
    if more or len(data) < length:
        environ["wsgi.input"] = _Resumed(io.BytesIO(data + more), source)
        _check_length(length, len(data))
        return None
    environ["wsgi.input"] = spool = io.BytesIO(data)
    return Body(length, spool, data=data)


class _Resumed(io.RawIOBase):
    """A stream of which some bytes were read: these come again, and then the rest, or the error that was met there."""

    def __init__(self, begun: IO[bytes], rest: Any, *, error: BaseException | None = None) -> None:
        self._begun = begun
        self._rest = rest
        self._error = error

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size >= 0:
            return super().read(size) or b""
        begun = self._begun.read()
        return begun if begun and self._error is not None else begun + self._rest_of_it(-1)

    def readinto(self, buffer: Any) -> int:
        got = self._begun.read(len(buffer)) or self._rest_of_it(len(buffer))
        buffer[: len(got)] = got
        return len(got)

    def _rest_of_it(self, size: int) -> bytes:
        if self._error is not None:
            raise self._error
        got: bytes = self._rest.read(size)
        return got

    def forget(self) -> None:
        """Free the disk now, for a request that is refused: a traceback keeps this for as long as an error tracker does."""
        with suppress(OSError):
            self._begun.close()
        self._begun = io.BytesIO()


def forget_body(request: Request) -> None:
    """Free what a body has taken that could not be read whole. Call it if the request is refused."""
    if isinstance(stream := request.environ["wsgi.input"], _Resumed):
        stream.forget()


def _refuse_lost(error: Exception) -> None:
    """Raise `TruncatedBody` for the errors by which a stream says that its client has gone."""
    if isinstance(error, ClientDisconnected | OSError):
        raise TruncatedBody("the connection ended before the body did") from error


def _read(request: Request, most: int | None) -> Body:
    """Read the whole body, and put it back as if it had never been read."""
    touched, length, environ = "stream" in request.__dict__, request.content_length, request.environ
    ends = "wsgi.input_terminated" in environ
    try:
        stream = request.stream
    except RequestEntityTooLarge:
        return Body(length=length)
    servers = _is_servers(stream, request)
    if not touched:
        # Werkzeug makes another when the view reads it, with the limit that the view may have set by then.
        request.__dict__.pop("stream", None)
    # Nested dispatches are often made without a body, from an environ whose stream is read already.
    if not (servers and length == 0 and not ends):
        position = _position(stream)
        if position or (servers and _position(environ["wsgi.input"])):
            raise BodyConsumed
        # Werkzeug's form parser opens the stream of other media types too, but does not read it.
        innocent = not touched or "form" in request.__dict__
        if servers and position is None and not innocent and (length or "HTTP_TRANSFER_ENCODING" in environ):
            raise BodyConsumed
    copy = _Copy(stream)
    whole = False
    try:
        copy.read(length if servers and not ends else None, most, environ["wsgi.input"])
        if servers:
            _check_length(length, copy.size)
        whole = True
    finally:
        copy.spool.seek(0)
        again = copy.spool if whole else copy.resumed(stream if touched or not servers else environ["wsgi.input"])
        if servers:
            environ["wsgi.input"] = again
        if touched or not servers:
            request.stream = cast("IO[bytes]", again)
    return Body(length=copy.size, stream=copy.spool)


class _Copy:
    """A copy of what is read of a stream: in memory, and from some size on in a file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.spool: IO[bytes] = io.BytesIO()
        self.size = 0
        self._piece = b""
        """What was read last and is not in the copy yet."""
        self._error: BaseException | None = None
        """What the stream raised."""

    def read(self, length: int | None, most: int | None, source: Any) -> None:
        """Copy `length` bytes, or all. Raises `TruncatedBody`, `BodyTooLarge` and `BodyNotKept`."""
        while length is None or self.size < length:
            if length is None and getattr(self._stream, "is_exhausted", False):
                # Werkzeug would silently cut the body off at its limit, or refuse one that ends exactly there.
                self._take(source, 1)
                if self._piece:
                    raise RequestEntityTooLarge
                return
            self._take(self._stream, _CHUNK if length is None else min(length - self.size, _CHUNK))
            if not self._piece:
                return
            if most is not None and self.size + len(self._piece) > most:
                raise BodyTooLarge
            self._keep()

    def _take(self, stream: Any, size: int) -> None:
        try:
            self._piece = stream.read(size)
        except Exception as error:
            # Werkzeug's error for the server's, or for a body that is too short or too long: it raises that again.
            self._error = error.__context__ if isinstance(error, HTTPException) else error
            _refuse_lost(error)
            raise

    def _keep(self) -> None:
        spool = self.spool
        try:
            if self.size + len(self._piece) > MEMORY_BYTES and isinstance(spool, io.BytesIO):
                begun, spool = spool.getvalue(), TemporaryBody()
                _write(spool, begun)
            _write(spool, self._piece)
        except OSError as error:
            self.spool.truncate(self.size)
            raise BodyNotKept(error) from error
        self.spool, self.size, self._piece = spool, self.size + len(self._piece), b""

    def resumed(self, rest: Any) -> _Resumed:
        """Return a stream that gives the copy and the piece again, and then the rest of the stream."""
        rest = _Resumed(io.BytesIO(self._piece), rest) if self._piece else rest
        return _Resumed(self.spool, rest, error=self._error)


def _write(file: Any, data: bytes) -> None:
    """Write this at the end of the copy. Past a file's buffer: what it could not flush would be lost."""
    view = memoryview(data)
    file = getattr(file, "raw", file)
    while view:
        view = view[file.write(view) :]


def _check_length(length: int | None, size: int) -> None:
    # gunicorn ends a truncated body as if it were whole.
    if length is not None and size < length:
        raise TruncatedBody(f"the body has {size} bytes and Content-Length announced {length}")


class TemporaryBody(io.BufferedRandom):
    """A file that closes with its last reference, without a ResourceWarning even if that was part of a cycle."""

    def __init__(self) -> None:
        file = TemporaryFile(buffering=0)  # noqa: SIM115 - the last reader's reference closes it
        super().__init__(cast(io.RawIOBase, file))

    def __del__(self) -> None:
        # There may be no file, or its disk may be full: `ValueError`, `OSError`.
        with suppress(OSError, ValueError):
            self.close()


def _is_servers(stream: IO[bytes], request: Request) -> bool:
    """Return whether this reads directly from the server, and not from a hook's stream, such as one that unzips."""
    return isinstance(cast(object, stream), LimitedStream) or stream is request.environ["wsgi.input"]


def _position(stream: IO[bytes] | CountingStream) -> int | None:
    if isinstance(stream, CountingStream):
        return stream.bytes_read
    try:
        return stream.tell()
    except Exception:  # noqa: BLE001 - a middleware's stream may raise anything
        return None
