"""Copy a body that is long or of unknown length, or find the copy of one that a hook or an outer dispatch has read.

`requests.read_body` comes here for every body that it cannot read with one call.
"""

from __future__ import annotations

import io
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any, cast

from flask import Request
from werkzeug.exceptions import ClientDisconnected, HTTPException, RequestEntityTooLarge
from werkzeug.wsgi import LimitedStream

from flask_idempotency.web.request_body import (
    BODY,
    CHUNK_BYTES,
    FORM_TYPES,
    MEMORY_BYTES,
    Body,
    BodyConsumed,
    BodyNotKept,
    BodyTooLarge,
    TruncatedBody,
    position_of,
)


def copy_body(request: Request, most: int | None) -> Body:
    """Return the whole body, and put it back as if it had never been read. Raises as `read_body` does."""
    cached: bytes | None = getattr(request, "_cached_data", None)
    # get_data() after a form was parsed caches b"", whose digest would not cover the form.
    if "form" in request.__dict__ and request.mimetype in FORM_TYPES and not cached:
        return Body(length=request.content_length, parsed=True)
    if cached is None:
        return _shared(request) or _read(request, most)
    stream = request.__dict__.get("stream")
    if stream is not None and _is_servers(stream, request):
        if (position_of(stream) or 0) > len(cached):
            raise BodyConsumed
        _check_length(request.content_length, len(cached))
    return Body(length=len(cached), stream=io.BytesIO(cached))


def _shared(request: Request) -> Body | None:
    """Return the body of an outer dispatch whose environ, with its stream, was copied. It is compared whole, even if read.

    None if the copy has another stream or length: then the view sees another body.
    """
    body: Body | None = request.environ.get(BODY)
    if body is None or body.stream is None or body.stream is not request.environ["wsgi.input"]:
        return None
    # Werkzeug reads a terminated stream to its end, whatever Content-Length says.
    same = "wsgi.input_terminated" in request.environ or request.content_length == body.length
    return Body(body.length, body.stream, shared=True) if same else None


class Resumed(io.RawIOBase):
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
    if isinstance(stream := request.environ["wsgi.input"], Resumed):
        stream.forget()


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
        position = position_of(stream)
        if position or (servers and position_of(environ["wsgi.input"])):
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
            self._take(self._stream, CHUNK_BYTES if length is None else min(length - self.size, CHUNK_BYTES))
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
            if isinstance(error, ClientDisconnected | OSError):
                raise TruncatedBody("the connection ended before the body did") from error
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

    def resumed(self, rest: Any) -> Resumed:
        """Return a stream that gives the copy and the piece again, and then the rest of the stream."""
        rest = Resumed(io.BytesIO(self._piece), rest) if self._piece else rest
        return Resumed(self.spool, rest, error=self._error)


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
