"""A line between a client and a server that can be cut on one side of a request."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal, Self, TypeAlias

CHUNK_BYTES = 65536
ACCEPT_SECONDS = 0.1
JOIN_SECONDS = 5.0

Loss: TypeAlias = Literal["request", "reply", "sender"]


class TcpProxy:
    """Passes bytes between clients and one server on this machine, counts what clients send, and loses what it is told.

    A lost request never reaches the server. A lost reply means that the server has acted: the proxy waits for its
    answer, and only then cuts the line. A delayed request loses its sender at once, and arrives when nobody expects it
    any more. All are recognised by `marker`, bytes that the request begins with or has near
    its beginning, because connecting takes requests of its own.
    """

    def __init__(self, port: int, *, marker: bytes = b"EVAL") -> None:
        self._upstream = ("127.0.0.1", port)
        self._marker = marker
        self._lock = threading.Lock()
        self._losses: list[Loss] = []
        self._delivery = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self.requests = 0
        """Marked requests that clients have sent so far, lost ones included."""
        self.chunks = 0
        """Pieces of any kind that clients have sent: as many as round trips when each waits for its answer."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(ACCEPT_SECONDS)
        self.port: int = self._listener.getsockname()[1]

    def lose_request(self) -> None:
        """The next marked request does not arrive."""
        self._losses.append("request")

    def lose_reply(self) -> None:
        """The next marked request arrives and is acted upon; its reply is lost."""
        self._losses.append("reply")

    def delay_request(self) -> None:
        """The next marked request arrives only at `deliver`, and whoever sends it is cut off at once."""
        self._delivery.clear()
        self._losses.append("sender")

    def deliver(self) -> None:
        """Let a delayed request arrive."""
        self._delivery.set()

    def cut(self) -> None:
        """Close every line that is open now, as a server does that restarts."""
        with self._lock:
            for line in self._open:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._delivery.set()
        self.cut()
        for thread in list(self._threads):
            thread.join(JOIN_SECONDS)
        self._listener.close()

    def _start(self, run: object, *arguments: object) -> None:
        assert callable(run)
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
        with client, socket.create_connection(self._upstream) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = _Line(client, server)
            with self._lock:
                self._open |= {client, server}
            if self._stopping:
                self.cut()
            try:
                answers = threading.Thread(target=line.pass_answers, daemon=True)
                answers.start()
                self._pass_requests(line)
                line.close()
                answers.join(JOIN_SECONDS)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_requests(self, line: _Line) -> None:
        with contextlib.suppress(OSError):
            while data := line.client.recv(CHUNK_BYTES):
                lost = self._note(data)
                if lost == "request":
                    return
                if lost == "reply":
                    line.swallow_next = True
                if lost == "sender":
                    line.client.shutdown(socket.SHUT_RDWR)
                    self._delivery.wait()
                line.server.sendall(data)

    def _note(self, data: bytes) -> Loss | None:
        with self._lock:
            self.chunks += 1
            if self._marker not in data[:64]:
                return None
            self.requests += 1
            return self._losses.pop(0) if self._losses else None


class _Line:
    """One client's connection and the server's end of it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.swallow_next = False

    def pass_answers(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(CHUNK_BYTES):
                if self.swallow_next:
                    break
                self.client.sendall(data)
        self.close()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
