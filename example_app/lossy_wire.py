"""A wire that can lose a reply: the server has done what was asked, and the client never hears of it."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from types import TracebackType
from typing import Self


class LossyWire:
    """Listens on a port of its own and passes everything on to the server's, until told to lose a reply."""

    def __init__(self, server_port: int) -> None:
        self.lost = 0
        self._to_lose = 0
        self._lock = threading.Lock()
        wire = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", server_port)) as server:
                    wire._carry(self.request, server)

        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self._listener.daemon_threads = True
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def lose_next_reply(self) -> None:
        with self._lock:
            self._to_lose += 1

    def stop(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Until one side hangs up, or a reply is due that must not arrive: both ends are then closed by our return."""
        while True:
            ready, _, _ = select.select([client, server], [], [])
            for source, target in ((client, server), (server, client)):
                if source not in ready:
                    continue
                data = source.recv(65536)
                if not data or (source is server and self._loses()):
                    return
                target.sendall(data)

    def _loses(self) -> bool:
        with self._lock:
            loses = self._to_lose > 0
            self._to_lose -= loses
            self.lost += loses
        return loses
