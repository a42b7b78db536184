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
    parser.add_argument("--no-key", action="store_true", help="send no key")
    parser.add_argument("--method", default="POST")
    parser.add_argument("--path", default="/payments")
    options = parser.parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    target = f"{options.method} {options.path}"
    make = request_maker(options.port, target, sys.stdin.buffer.read(), key=options.key, keyed=not options.no_key)
    print(json.dumps(drive(options.port, make, connections=options.connections, seconds=options.seconds)))
    return 0


def request_maker(port: int, target: str, payment: bytes, *, key: str | None, keyed: bool) -> Callable[[], bytes]:
    lines = [
        f"{target} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "User-Agent: payments-client/4.2",
        "Accept: application/json",
    ]
    if payment:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payment)}"]
    head, tail = "\r\n".join(lines).encode(), HEAD_END + payment
    if not keyed:
        whole = head + tail
        return lambda: whole
    head += b"\r\nIdempotency-Key: "
    if key is not None:
        known = head + key.encode() + tail
        return lambda: known
    return lambda: head + str(uuid4()).encode() + tail


@dataclass(slots=True)
class Connection:
    """A connection, the part of the response that has come, and when it sent its request."""

    socket: socket.socket
    received: bytes = b""
    asked: int = 0

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
    """Keep every connection busy for that long, and at least until one response came.

    Return the number of responses by kind, the rate per second, and the median and the 99th percentile of the times in µs.
    """
    kinds: Counter[str] = Counter()
    taken: list[int] = []
    with selectors.DefaultSelector() as selector:
        open_connections = [
            Connection(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)) for _ in range(connections)
        ]
        for connection in open_connections:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.asked = time.perf_counter_ns()
            connection.socket.sendall(make())
        began = time.perf_counter()
        while not taken or time.perf_counter() < began + seconds:
            ready = selector.select(PATIENCE_SECONDS)
            if not ready:
                raise TimeoutError(f"No response came for {PATIENCE_SECONDS:.0f} s.")
            for chosen, _ in ready:
                connection = chosen.data
                kind = connection.take()
                if kind is not None:
                    kinds[kind] += 1
                    taken.append(time.perf_counter_ns() - connection.asked)
                    request = make()
                    connection.asked = time.perf_counter_ns()
                    connection.socket.sendall(request)
        took = time.perf_counter() - began
        for connection in open_connections:
            connection.socket.close()
    taken.sort()
    times = {name: taken[int(len(taken) * part)] / 1000 for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {"rate": kinds.total() / took, "kinds": dict(kinds), **times}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
