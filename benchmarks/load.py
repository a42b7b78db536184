"""The load generator: a separate process with one thread and some keep-alive connections.

`serving` starts it once for each measurement, with the request's body on its standard input. It prints one line of JSON.
It uses sockets only, because on a small machine the server under test needs every cycle. It imports no module of ours,
because it starts often.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

PATIENCE_SECONDS = 10.0
HEAD_END = b"\r\n\r\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--key", help="send this key with every request (default: a new key for each)")
    options = parser.parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    make = request_maker(options.port, options.key, sys.stdin.buffer.read())
    print(json.dumps(drive(options.port, make, connections=options.connections, seconds=options.seconds)))
    return 0


def request_maker(port: int, key: str | None, payment: bytes) -> Callable[[], bytes]:
    head = (
        f"POST /payments HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: payments-client/4.2\r\n"
        f"Accept: application/json\r\nContent-Type: application/json\r\nContent-Length: {len(payment)}\r\n"
        "Idempotency-Key: "
    ).encode()
    tail = HEAD_END + payment
    if key is not None:
        whole = head + key.encode() + tail
        return lambda: whole
    return lambda: head + str(uuid4()).encode() + tail


@dataclass(slots=True)
class Connection:
    """A connection, and the part of the response that has come."""

    socket: socket.socket
    received: bytes = b""

    def take(self) -> str | None:
        """Read what is there. Return the kind of a complete response: its status, and `replayed` if a header says so."""
        chunk = self.socket.recv(65536)
        if not chunk:
            raise ConnectionError("The server closed a keep-alive connection.")
        self.received += chunk
        head, end, body = self.received.partition(HEAD_END)
        if not end:
            return None
        lowered = head.lower()
        _, named, length = lowered.partition(b"content-length:")
        if not named:
            raise ConnectionError(f"A response has no length: {head!r}")
        if len(body) < int(length.partition(b"\r\n")[0]):
            return None
        self.received = b""
        replayed = b"idempotency-replayed: true" in lowered
        return head[9:12].decode() + (" replayed" if replayed else "")


def drive(port: int, make: Callable[[], bytes], *, connections: int, seconds: float) -> dict[str, object]:
    """Keep every connection busy for that long. Return the number of responses by kind, and the rate per second."""
    kinds: Counter[str] = Counter()
    with selectors.DefaultSelector() as selector:
        open_connections = [
            Connection(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)) for _ in range(connections)
        ]
        for connection in open_connections:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.socket.sendall(make())
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            ready = selector.select(PATIENCE_SECONDS)
            if not ready:
                raise TimeoutError(f"No response came for {PATIENCE_SECONDS:.0f} s.")
            for chosen, _ in ready:
                connection = chosen.data
                kind = connection.take()
                if kind is not None:
                    kinds[kind] += 1
                    connection.socket.sendall(make())
        took = time.perf_counter() - began
        for connection in open_connections:
            connection.socket.close()
    return {"rate": kinds.total() / took, "kinds": dict(kinds)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
