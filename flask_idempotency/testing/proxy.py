"""A line between a client and a server that can be cut on one side of a request, held, delayed, or go dead."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal, Self, TypeAlias

from flask_idempotency.testing.doubles import Gate

CHUNK_BYTES = 65536
ACCEPT_SECONDS = 0.1
JOIN_SECONDS = 5.0
CAUGHT_SECONDS = 30.0

Loss: TypeAlias = Literal["request", "reply", "sender"]


class TcpProxy:
    """Passes bytes between clients and one server on this machine, counts what clients send, and loses what it is told.

    A lost request never reaches the server. A lost reply means that the server has acted: the proxy waits for its
    answer, and only then cuts the line. A delayed request loses its sender at once, and arrives when nobody expects it
    any more. All are recognised by `marker`, bytes that the request begins with or has near
    its beginning, because connecting takes requests of its own.

    To hold, drop or delay concerns every byte, marked or not, of the lines that are open and of those to come.
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
        self.requests = 0
        """Marked requests that clients have sent so far, lost ones included."""
        self.chunks = 0
        """Pieces of any kind that clients have sent: as many as round trips when each waits for its answer."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(ACCEPT_SECONDS)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        """The way through it, for a client of Redis."""
        return f"redis://127.0.0.1:{self.port}/0"

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

    def hold_requests(self) -> None:
        """From now on nothing reaches the server, until `release`."""
        self._requests.set("held")

    def hold_replies(self) -> None:
        """From now on the server acts on everything, and nobody hears of it until `release`."""
        self._replies.set("held")

    def drop_requests(self) -> None:
        """From now on what clients say is lost, and their lines stay open."""
        self._requests.set("dropping")

    def drop_replies(self) -> None:
        """From now on what the server says is lost, and the lines stay open."""
        self._replies.set("dropping")

    def blackhole(self) -> None:
        """Like a machine whose network is gone: lines stay open, new ones are accepted, and nothing comes back."""
        self.drop_requests()
        self.drop_replies()

    def delay(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """From now on each piece takes so many seconds more, in either direction."""
        self._requests.delay_seconds, self._replies.delay_seconds = requests, replies

    def caught(self) -> None:
        """Wait until something is being held."""
        gates = [gate for gate in (self._requests, self._replies) if gate.holds]
        assert any(gate.caught(seconds=CAUGHT_SECONDS) for gate in gates), "nothing came to be held"

    def release(self) -> None:
        """Pass on what was held, in its order, and everything that comes; what was dropped is gone."""
        self._requests.set("open")
        self._replies.set("open")

    def cut(self) -> None:
        """Close every line that is open now, as a server does that restarts; what was held is lost, and no more is held."""
        with self._lock:
            for line in self._open:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
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
        # Without a server the client's line ends at once, as the server's own address would refuse it.
        with client, contextlib.suppress(ConnectionError), socket.create_connection(self._upstream) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = _Line(client, server, self._replies)
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
                if self._requests.passes():
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

    def __init__(self, client: socket.socket, server: socket.socket, replies: Gate) -> None:
        self.client = client
        self.server = server
        self._replies = replies
        self.swallow_next = False

    def pass_answers(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(CHUNK_BYTES):
                if self.swallow_next:
                    break
                if self._replies.passes():
                    self.client.sendall(data)
        self.close()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
