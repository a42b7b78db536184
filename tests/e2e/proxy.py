"""A line to a server that can be held: what is said into it, or what comes back, waits until the test lets it pass."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.e2e.ledger import PATIENCE_SECONDS


class Proxy:
    """Stands before one server on the loopback interface. All connections are held, or none."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._holding: dict[bool, bool] = {True: False, False: False}
        self._held: list[tuple[socket.socket, bytes]] = []
        self._caught = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold_requests(self) -> None:
        """From now on nothing reaches the server."""
        self._hold(True)

    def hold_replies(self) -> None:
        """From now on the server acts on everything, and nobody hears of it."""
        self._hold(False)

    def caught(self) -> None:
        """Wait until something is being held."""
        assert self._caught.wait(PATIENCE_SECONDS), "nothing came to be held"

    def release(self) -> None:
        """Pass on what was held, and hold no more."""
        with self._lock:
            self._holding = {True: False, False: False}
            for onward, data in self._held:
                with suppress(OSError):  # whoever waited for it may be gone
                    onward.sendall(data)
            self._forget()

    def cut(self) -> None:
        """What was held is lost, and the connections that it was on end; hold no more."""
        with self._lock:
            self._holding = {True: False, False: False}
            for onward in {onward for onward, _ in self._held}:
                with suppress(OSError):  # ended by itself
                    onward.shutdown(socket.SHUT_RDWR)
            self._forget()

    def _hold(self, request: bool) -> None:
        with self._lock:
            self._holding[request] = True

    def _forget(self) -> None:
        self._held.clear()
        self._caught.clear()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._pass(key.fileobj, *key.data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        for end, onward, is_request in ((near, far, True), (far, near, False)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ, (onward, is_request))

    def _pass(self, end: socket.socket, onward: socket.socket, is_request: bool) -> None:
        if end.fileno() < 0:  # its other end was read first in this round, and had ended
            return
        try:
            data = end.recv(65536)
            if data:
                self._pass_on(data, onward, is_request)
                return
        except OSError:
            pass
        for side in (end, onward):
            if side.fileno() >= 0:
                self._selector.unregister(side)
                side.close()

    def _pass_on(self, data: bytes, onward: socket.socket, is_request: bool) -> None:
        with self._lock:
            if self._holding[is_request]:
                self._held.append((onward, data))
                self._caught.set()
            else:
                onward.sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
