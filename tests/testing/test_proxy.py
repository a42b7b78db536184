"""The proxy holds, drops and delays chunks in one direction or in both."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flask_idempotency.testing import TcpProxy
from tests.tooling.processes import eventually

PATIENCE_SECONDS = 60.0
BRIEF_SECONDS = 0.05
"""Only for what never comes."""


class Echo:
    """A server that echoes and records chunks."""

    def __init__(self) -> None:
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line, suppress(OSError):
            while data := line.recv(100):
                self.heard += data
                line.sendall(data)

    def stop(self) -> None:
        with suppress(OSError):  # stopped before
            # Closed alone it would go on accepting for whoever waits in there.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(echo.port) as proxy:
        yield proxy


@pytest.fixture
def line(proxy: TcpProxy) -> Iterator[socket.socket]:
    """A client's, that has been used."""
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as line:
        line.sendall(b"hello;")
        assert line.recv(100) == b"hello;"
        yield line


def silent(line: socket.socket) -> bool:
    line.settimeout(BRIEF_SECONDS)
    try:
        line.recv(100)
    except TimeoutError:
        return True
    finally:
        line.settimeout(PATIENCE_SECONDS)
    return False


def received(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (data := line.recv(100)):
        found += data
    return found


def test_held_requests_reach_the_server_when_they_are_released(
    proxy: TcpProxy, line: socket.socket, echo: Echo
) -> None:
    """In their order, and not before."""
    proxy.hold_requests()
    line.sendall(b"one;")
    proxy.caught()
    line.sendall(b"two;")
    heard = echo.heard

    proxy.release()

    assert heard == b"hello;"
    assert received(line, 8) == b"one;two;"


def test_held_replies_are_of_what_the_server_has_done(proxy: TcpProxy, line: socket.socket, echo: Echo) -> None:
    proxy.hold_replies()
    line.sendall(b"one;")
    proxy.caught()

    assert echo.heard == b"hello;one;"
    assert silent(line)
    proxy.release()
    assert received(line, 4) == b"one;"


def test_what_was_held_is_lost_when_its_line_is_cut(proxy: TcpProxy, line: socket.socket, echo: Echo) -> None:
    """And a new line is free."""
    proxy.hold_requests()
    line.sendall(b"one;")
    proxy.caught()

    proxy.cut()

    assert line.recv(100) == b""
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as another:
        another.sendall(b"two;")
        assert received(another, 4) == b"two;"
    assert echo.heard == b"hello;two;"


@pytest.mark.parametrize("direction", ("requests", "replies"))
def test_one_direction_is_lost_and_the_line_stays_open(
    proxy: TcpProxy, line: socket.socket, echo: Echo, direction: str
) -> None:
    """A dropped request does not reach the server. A dropped reply does not reach the client, but the server acts."""
    getattr(proxy, f"drop_{direction}")()
    line.sendall(b"one;")
    assert silent(line)
    if direction == "replies":
        assert eventually(lambda: echo.heard == b"hello;one;")
    proxy.release()
    line.sendall(b"two;")

    assert received(line, 4) == b"two;"
    assert echo.heard == (b"hello;two;" if direction == "requests" else b"hello;one;two;")


def test_a_blackhole_accepts_and_answers_nothing(proxy: TcpProxy, line: socket.socket, echo: Echo) -> None:
    proxy.blackhole()
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as another:
        another.sendall(b"one;")
        line.sendall(b"two;")

        assert silent(another)
        assert silent(line)
    assert echo.heard == b"hello;"


def test_delayed_pieces_arrive_all_the_same(proxy: TcpProxy, line: socket.socket) -> None:
    proxy.delay(requests=BRIEF_SECONDS, replies=BRIEF_SECONDS)
    line.sendall(b"one;")

    assert received(line, 4) == b"one;"


def test_a_line_to_a_server_that_is_gone_ends(proxy: TcpProxy, echo: Echo) -> None:
    """As the server's own address would end it; the proxy lives on."""
    echo.stop()
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS) as line:
        assert line.recv(100) == b""
