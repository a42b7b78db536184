"""A TCP proxy that loses, holds, delays or drops what a client and a server send."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeAlias

from flask_idempotency.testing.doubles import Gate

CHUNK_BYTES = 65536
ACCEPT_SECONDS = 0.1
JOIN_SECONDS = 5.0
CAUGHT_SECONDS = 30.0

Loss: TypeAlias = Literal["request", "reply", "sender"]


class TcpProxy:
    """A proxy between clients and one server on this machine, which loses the requests and replies that you choose.

    The server never gets a lost request. It has acted on a request whose reply is lost: the proxy waits for the reply, and
    then cuts the connection. For a delayed request, the proxy cuts off the client first, and sends it on later.

    The proxy counts and loses only requests that have `marker` in their first 64 bytes, because clients also send requests
    to connect. Holding, dropping and delaying affect all bytes of open and later connections.
    """

    def __init__(self, port: int, *, marker: bytes = b"EVAL") -> None:
        self._upstream = ("127.0.0.1", port)
        self._marker = marker
        self._lock = threading.Lock()
        self._losses: list[Loss] = []
        self._delivery = threading.Event()
        self._requests, self._replies = Gate(), Gate()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self.requests: int = 0
        """Marked requests that clients have sent so far, with the lost ones."""
        self.chunks: int = 0
        """Chunks that clients have sent: one for each round trip, if the client waits for each reply."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(ACCEPT_SECONDS)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        """The URL of the proxy for a Redis client."""
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_request(self) -> None:
        """Lose the next marked request."""
        self._losses.append("request")

    def lose_reply(self) -> None:
        """Pass the next marked request on, and lose its reply."""
        self._losses.append("reply")

    def delay_request(self) -> None:
        """Cut off the client of the next marked request, and pass the request on when you call `deliver`."""
        self._delivery.clear()
        self._losses.append("sender")

    def deliver(self) -> None:
        """Pass the delayed request on."""
        self._delivery.set()

    def hold_requests(self) -> None:
        """Hold all requests until `release`."""
        self._requests.set("held")

    def hold_replies(self) -> None:
        """Hold all replies until `release`. The server still acts on requests."""
        self._replies.set("held")

    def drop_requests(self) -> None:
        """Drop all requests. Connections stay open."""
        self._requests.set("dropping")

    def drop_replies(self) -> None:
        """Drop all replies. Connections stay open."""
        self._replies.set("dropping")

    def blackhole(self) -> None:
        """Drop requests and replies, as a broken network does. Accept new connections."""
        self.drop_requests()
        self.drop_replies()

    def delay(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """Delay each chunk by so many seconds in each direction."""
        self._requests.delay_seconds, self._replies.delay_seconds = requests, replies

    def caught(self) -> None:
        """Wait until the proxy holds a chunk. Raises `AssertionError` after 30 seconds."""
        gates = [gate for gate in (self._requests, self._replies) if gate.holds]
        assert any(gate.caught(seconds=CAUGHT_SECONDS) for gate in gates), (
            f"the proxy held no chunk within {CAUGHT_SECONDS} s"
        )

    def release(self) -> None:
        """Pass on held chunks, in order, and all later ones. Dropped chunks stay lost."""
        self._requests.set("open")
        self._replies.set("open")

    def cut(self) -> None:
        """Close every open connection, as a restarting server does. Lose held chunks, and hold no more."""
        with self._lock:
            for open_socket in self._open:
                with contextlib.suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
        self._requests.end_holding()
        self._replies.end_holding()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._delivery.set()
        self.cut()
        self._requests.end()
        self._replies.end()
        for thread in list(self._threads):
            thread.join(JOIN_SECONDS)
        self._listener.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        # Without a server, close the client's connection, as the server's own address would refuse it.
        with client, contextlib.suppress(ConnectionError), socket.create_connection(self._upstream) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server, self._replies)
            with self._lock:
                self._open |= {client, server}
            if self._stopping:
                self.cut()
            try:
                replies = threading.Thread(target=connection.pass_replies, daemon=True)
                replies.start()
                self._pass_requests(connection)
                connection.close()
                replies.join(JOIN_SECONDS)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_requests(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            while data := connection.client.recv(CHUNK_BYTES):
                lost = self._note(data)
                if lost == "request":
                    return
                if lost == "reply":
                    connection.swallow_next = True
                if lost == "sender":
                    connection.client.shutdown(socket.SHUT_RDWR)
                    self._delivery.wait()
                if self._requests.passes():
                    connection.server.sendall(data)

    def _note(self, data: bytes) -> Loss | None:
        with self._lock:
            self.chunks += 1
            if self._marker not in data[:64]:
                return None
            self.requests += 1
            return self._losses.pop(0) if self._losses else None


@dataclass(slots=True, eq=False)
class _Connection:
    """A client's connection and its connection to the server."""

    client: socket.socket
    server: socket.socket
    replies: Gate
    swallow_next: bool = False

    def pass_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(CHUNK_BYTES):
                if self.swallow_next:
                    break
                if self.replies.passes():
                    self.client.sendall(data)
        self.close()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
