"""Requests per second from a process of its own: one thread, some keep-alive connections, nothing but sockets.

Started by `serving`, once per measurement; prints one line of JSON. Lean, because on a small machine every cycle that
the client takes is one that the server under test does not get.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from benchmarks.machine import pin
from benchmarks.payloads import PAYMENT

PATIENCE_SECONDS = 10.0
HEAD_END = b"\r\n\r\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--key", help="send this key with every request; without it every request has its own")
    options = parser.parse_args(arguments)
    pin(0, options.core)
    make = request_maker(options.port, options.key)
    print(json.dumps(drive(options.port, make, connections=options.connections, seconds=options.seconds)))
    return 0


def request_maker(port: int, key: str | None) -> Callable[[], bytes]:
    head = (
        f"POST /payments HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: payments-client/4.2\r\n"
        f"Accept: application/json\r\nContent-Type: application/json\r\nContent-Length: {len(PAYMENT)}\r\n"
        "Idempotency-Key: "
    ).encode()
    tail = HEAD_END + PAYMENT
    if key is not None:
        whole = head + key.encode() + tail
        return lambda: whole
    return lambda: head + str(uuid4()).encode() + tail


@dataclass(slots=True)
class Line:
    """One connection and what has come back on it of the answer it is waiting for."""

    socket: socket.socket
    received: bytes = b""

    def take(self) -> str | None:
        """Reads what is there. The answer's kind once it is complete: its status, and `replayed` if it says so."""
        chunk = self.socket.recv(65536)
        if not chunk:
            raise ConnectionError("the server closed a connection that was to be kept")
        self.received += chunk
        head, end, body = self.received.partition(HEAD_END)
        if not end:
            return None
        lowered = head.lower()
        _, named, length = lowered.partition(b"content-length:")
        if not named:
            raise ConnectionError(f"an answer without a length: {head!r}")
        if len(body) < int(length.partition(b"\r\n")[0]):
            return None
        self.received = b""
        replayed = b"idempotency-replayed: true" in lowered
        return head[9:12].decode() + (" replayed" if replayed else "")


def drive(port: int, make: Callable[[], bytes], *, connections: int, seconds: float) -> dict[str, object]:
    """Keeps every connection busy for that long. What was answered, by kind, and how many per second."""
    kinds: Counter[str] = Counter()
    with selectors.DefaultSelector() as selector:
        lines = [Line(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)) for _ in range(connections)]
        for line in lines:
            line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(line.socket, selectors.EVENT_READ, line)
            line.socket.sendall(make())
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            ready = selector.select(PATIENCE_SECONDS)
            if not ready:
                raise TimeoutError(f"no answer for {PATIENCE_SECONDS:.0f} s")
            for chosen, _ in ready:
                line = chosen.data
                kind = line.take()
                if kind is not None:
                    kinds[kind] += 1
                    line.socket.sendall(make())
        took = time.perf_counter() - began
        for line in lines:
            line.socket.close()
    return {"rate": kinds.total() / took, "kinds": dict(kinds)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
