"""Bodies of every kind, sent in every way a WSGI server may hand them on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import IO, Any

from flask import Flask, Request
from werkzeug.test import EnvironBuilder, run_wsgi_app

Environ = dict[str, Any]
Delivery = Callable[[Environ, bytes], None]


class Pipe:
    """A server's own stream, such as gunicorn's: it can be read once and has no position."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def readline(self, size: int = -1) -> bytes:
        return self._stream.readline(size)

    def __iter__(self) -> Iterable[bytes]:
        return iter(self._stream)


def by_length(environ: Environ, data: bytes) -> None:
    """As the test client does."""


def endless(environ: Environ, data: bytes) -> None:
    """As Werkzeug's own server does: the connection stays open, and only Content-Length says where to stop."""
    environ |= {"wsgi.input": Pipe(data + b"the next request")}


def terminated(environ: Environ, data: bytes) -> None:
    """As gunicorn does with a Content-Length."""
    environ |= {"wsgi.input": Pipe(data), "wsgi.input_terminated": True}


def seekable(environ: Environ, data: bytes) -> None:
    """As waitress does."""
    environ |= {"wsgi.input": io.BytesIO(data), "wsgi.input_terminated": True}


def chunked(environ: Environ, data: bytes) -> None:
    """As gunicorn does without one."""
    terminated(environ, data)
    environ.pop("CONTENT_LENGTH", None)
    environ["HTTP_TRANSFER_ENCODING"] = "chunked"


DELIVERIES: tuple[Delivery, ...] = (by_length, endless, terminated, seekable, chunked)


def environ_of(
    data: bytes = b"", media_type: str = "application/json", *, delivery: Delivery = by_length, **more: Any
) -> Environ:
    """A POST of this body to `/`."""
    builder = EnvironBuilder(**{"method": "POST", "path": "/", "data": data, "content_type": media_type} | more)
    environ: Environ = dict(builder.get_environ())
    builder.close()
    delivery(environ, data)
    return environ


class LooseRequest(Request):
    """Keeps uploaded files in memory: outside of an application nobody would close them."""

    def _get_file_stream(self, *size_and_names: Any, **more: Any) -> IO[bytes]:
        return io.BytesIO()


def request_of(data: bytes = b"", media_type: str = "application/json", **more: Any) -> Request:
    """The same, as a view has it."""
    return LooseRequest(environ_of(data, media_type, **more))


def send(app: Flask, environ: Environ) -> tuple[int, bytes]:
    """Return the status and the body of the application's response."""
    body, status, _ = run_wsgi_app(app, environ)
    return int(status[:3]), b"".join(body)


def multipart(*parts: tuple[str, str | None, str | None, bytes], boundary: str = "xx") -> tuple[bytes, str]:
    """The body and media type of a form of (name, filename, type, content)."""
    body = b""
    for name, filename, media_type, content in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        typed = f"Content-Type: {media_type}\r\n" if media_type else ""
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{typed}\r\n'.encode()
        body += content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
