"""A client that speaks bytes: it can stop in mid-sentence, hang up, or say what no HTTP library would."""

from __future__ import annotations

import http.client
import json
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from tests.e2e.ledger import PATIENCE_SECONDS
from tests.e2e.service import CASE, STEPS

Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The only line of this name, or None. Two of them are never right in what we send."""
        values = [value for other, value in self.headers if other.lower() == name.lower()]
        assert len(values) < 2, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """Which problem this is, or None when it is none of ours."""
        return self.json["code"] if self.header("Content-Type") == "application/problem+json" else None

    @property
    def told(self) -> tuple[int, str | None]:
        """Status and problem code: what a refusal comes down to."""
        return self.status, self.code

    @property
    def replayed(self) -> bool:
        return self.header("Idempotency-Replayed") == "true"


def message(method: str, path: str, headers: Headers = (), body: bytes | None = b"") -> bytes:
    """A request. With a body of None nothing is said about one, so that `headers` can say what is not true."""
    length = [] if body is None else [("Content-Length", str(len(body)))]
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        *(f"{name}: {value}" for name, value in [*headers, *length]),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


@dataclass(frozen=True, slots=True)
class Order:
    """Something that a client wants to happen once: each attempt is the same request, whatever it tells the view to do."""

    path: str
    key: str = field(default_factory=lambda: str(uuid4()))
    body: bytes = b'{"amount": 100}'
    media_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    case: str = field(default_factory=lambda: uuid4().hex)
    """What the ledger files it under. Not the key: two callers may choose the same one."""

    def attempt(self, *steps: str) -> bytes:
        told = [("Idempotency-Key", self.key), (CASE, self.case), (STEPS, " ".join(steps))]
        return message("POST", self.path, [*told, ("Content-Type", self.media_type), *self.headers], self.body)


class Wire:
    """One connection."""

    def __init__(self, port: int, *, address: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((address, port), timeout=PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> Self:
        self._socket.sendall(data)
        return self

    def head(self) -> http.client.HTTPResponse:
        """Status and headers of the next answer, as soon as they are there; its body can be read from what is returned."""
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        return response

    def answer(self) -> Answer:
        """The next answer, whole. Raises `IncompleteRead` or `RemoteDisconnected` when it is cut off."""
        with self.head() as response:
            body = response.read()
            return Answer(response.status, tuple(response.getheaders()), body)

    def until(self, marker: bytes) -> bytes:
        """The bytes as they come, until these have come."""
        data = b""
        while marker not in data:
            piece = self._socket.recv(65536)
            assert piece, f"the connection ended before {marker!r}"
            data += piece
        return data

    def exactly(self, size: int) -> bytes:
        """The next so many bytes."""
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            assert piece, f"the connection ended {size - len(data)} bytes early"
            data += piece
        return data

    def so_far(self, seconds: float = 0.3) -> bytes:
        """The bytes that come until nothing has come for so long."""
        data = b""
        while not self.silent(seconds) and (piece := self._socket.recv(65536)):
            data += piece
        return data

    def silent(self, seconds: float = 0.3) -> bool:
        """Whether nothing arrives for so long, not even an end."""
        return not select.select([self._socket], [], [], seconds)[0]

    def ended(self) -> bool:
        """Whether the connection ends without another byte."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except ConnectionResetError:
            return True

    def half_close(self) -> Self:
        """Nothing more will be sent; answers are still read."""
        self._socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Hang up the hard way: the other side is told with RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask(port: int, data: bytes) -> Answer:
    """One request on a connection of its own."""
    with Wire(port) as wire:
        return wire.send(data).answer()


def ask_until_settled(port: int, data: bytes) -> Answer:
    """Ask again while the answer is "in flight" or there is none, as a client does; but without the pauses it would make."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(http.client.RemoteDisconnected, ConnectionResetError):
            answer = ask(port, data)
            if answer.code != "in-flight":
                return answer
        time.sleep(0.02)
    raise AssertionError(f"still in flight after {PATIENCE_SECONDS:.0f} s")
