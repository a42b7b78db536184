"""A socket server that answers each request with the next line of a script, and four ways to call it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import anyio
import httpx
import requests

from flask_idempotency.client import Retries, Timing
from flask_idempotency.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter

TIMEOUT = 60.0
"""Seconds. A call or a server that takes so long has failed."""
CERTIFICATES = ssl.create_default_context()
"""httpx would read them for each transport, for 30 ms, although the server has no TLS."""


@dataclass(frozen=True)
class Seen:
    """One request that the server has read whole."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


class Drop:
    """Close the connection without a byte."""


class Silence:
    """Send nothing more until the client hangs up."""

    def __init__(self, first: bytes = b"") -> None:
        self.first = first


@dataclass
class Drip:
    """Send a piece, and the next one when the client's clock has gone on."""

    pieces: Iterable[bytes]
    between: Callable[[], None]


Line: TypeAlias = bytes | Drop | Silence | Drip


def reply(status: int = 201, body: bytes = b'{"id": 1}', *fields: str, kind: str = "application/json") -> bytes:
    # The server closes each connection. Without the field, a client may send into one that is about to close.
    head = [
        f"HTTP/1.1 {status} X",
        "Connection: close",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *fields,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def problem(code: str, status: int, *fields: str) -> bytes:
    body = f'{{"type": "https://docs.example/problems/{code}", "code": "{code}", "status": {status}}}'
    return reply(status, body.encode(), *fields, kind="application/problem+json")


class ScriptedServer:
    """Answers each request with the next line. The last one repeats. One connection at a time is enough for a test."""

    def __init__(self) -> None:
        self.script: list[Line] = [reply()]
        self.seen: list[Seen] = []
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> list[str | None]:
        return [request.key for request in self.seen]

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT).close()
        self._thread.join(TIMEOUT)
        self._socket.close()
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._stopping:
            connection, _ = self._socket.accept()
            with connection, suppress(ConnectionError, TimeoutError):
                connection.settimeout(TIMEOUT)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = _read(connection)
        if request is None:
            return
        self.seen.append(request)
        line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        match line:
            case bytes():
                # One request a connection, so that a cut reply does not break the next one.
                connection.sendall(line)
            case Drop():
                pass
            case Silence(first=first):
                connection.sendall(first)
                while connection.recv(65536):
                    pass
            case Drip():
                for piece in line.pieces:
                    connection.sendall(piece)
                    line.between()
                while connection.recv(65536):
                    pass


def _read(connection: socket.socket) -> Seen | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(65536)
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return Seen(method, path, headers, body)


@dataclass
class Clock:
    """A clock that only pauses move, and the pauses."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)
    jitter: float = 1.0
    """Which part of the longest random wait is taken."""
    longest: list[float] = field(default_factory=list)

    def timing(self) -> Timing:
        return Timing(
            monotonic=lambda: self.now, uniform=self._uniform, sleep=self._sleep, async_sleep=self._async_sleep
        )

    def _uniform(self, low: float, high: float) -> float:
        assert low == 0
        self.longest.append(high)
        return high * self.jitter

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def _async_sleep(self, seconds: float) -> None:
        self._sleep(seconds)
        await anyio.lowlevel.checkpoint()


@dataclass(frozen=True)
class Got:
    status: int
    headers: Mapping[str, str]
    body: bytes
    json: Callable[[], Any]


class Caller(Protocol):
    """One HTTP library with our transport."""

    kind: str

    def __call__(self, method: str, url: str, **options: Any) -> Got: ...


class HttpxCaller:
    kind = "httpx"

    def __init__(self, retries: Retries, **options: Any) -> None:
        self.transport = IdempotentTransport(retries=retries, verify=CERTIFICATES, **options)

    def __call__(self, method: str, url: str, **options: Any) -> Got:
        options.setdefault("timeout", TIMEOUT)
        hooks = options.pop("event_hooks", None)
        with httpx.Client(transport=self.transport, follow_redirects=True, event_hooks=hooks) as client:
            response = client.request(method, url, **options)
        return Got(response.status_code, response.headers, response.content, response.json)


class AsyncCaller:
    def __init__(self, backend: Literal["asyncio", "trio"], retries: Retries, **options: Any) -> None:
        self.kind = f"httpx-{backend}"
        self._backend = backend
        self._retries, self._options = retries, options

    def __call__(self, method: str, url: str, **options: Any) -> Got:
        options.setdefault("timeout", TIMEOUT)
        hooks = options.pop("event_hooks", None)

        async def call() -> Got:
            transport = AsyncIdempotentTransport(retries=self._retries, verify=CERTIFICATES, **self._options)
            async with httpx.AsyncClient(transport=transport, follow_redirects=True, event_hooks=hooks) as client:
                response = await client.request(method, url, **options)
                return Got(response.status_code, response.headers, response.content, response.json)

        return anyio.run(call, backend=self._backend)


class RequestsCaller:
    kind = "requests"

    def __init__(self, retries: Retries, **options: Any) -> None:
        self.adapter = IdempotentAdapter(retries=retries, **options)

    def __call__(self, method: str, url: str, **options: Any) -> Got:
        options.setdefault("timeout", TIMEOUT)
        if "content" in options:
            options["data"] = options.pop("content")
        with requests.Session() as session:
            session.mount("http://", self.adapter)
            response = session.request(method, url, **options)
        return Got(response.status_code, response.headers, response.content, response.json)


KINDS = ("httpx", "httpx-asyncio", "httpx-trio", "requests")


def caller(kind: str, retries: Retries, **options: Any) -> Caller:
    match kind:
        case "httpx":
            return HttpxCaller(retries, **options)
        case "httpx-asyncio":
            return AsyncCaller("asyncio", retries, **options)
        case "httpx-trio":
            return AsyncCaller("trio", retries, **options)
        case "requests":
            return RequestsCaller(retries, **options)
    raise ValueError(kind)


@contextmanager
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.close()
