"""What a request costs the Redis server: round trips, the time of its commands, processor time and memory."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import redis
from flask import Flask

from benchmarks.apps import PAYMENT
from benchmarks.harness import FIRST, PEER, Case, call, environ

COUNTED_REQUESTS = 20
RECORDS = 50
AT_ONCE = 50
"""Requests of one case in a round."""


@dataclass(slots=True)
class ServerTime:
    """The µs of one request in the server: in its commands by name, and the processor time of the whole process."""

    commands: dict[str, float] = field(default_factory=dict)
    processor: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.commands.values())


def server_times(client: redis.Redis, cases: Sequence[Case], *, rounds: int) -> list[ServerTime]:
    """Measure each case in interleaved rounds, by the server's own statistics. This resets them."""
    commands: list[list[dict[str, float]]] = [[] for _ in cases]
    processor: list[list[float]] = [[] for _ in cases]
    for case in cases:
        _requests(case)
    for _ in range(rounds):
        for number in random.sample(range(len(cases)), len(cases)):
            taken = _round(client, cases[number])
            # The peer has no scripts: one that ran renewed the lease of a request that another application holds in flight.
            while cases[number].app == PEER and "evalsha" in _statistics(client):
                taken = _round(client, cases[number])
            processor[number].append(taken)
            commands[number].append(_commands(client, cases[number]))
    return [ServerTime(_medians(each), median(taken)) for each, taken in zip(commands, processor, strict=True)]


def _round(client: redis.Redis, case: Case) -> float:
    """Return the processor time of the server for one request of the case, in µs."""
    client.config_resetstat()
    before = _processor(client)
    _requests(case)
    return (_processor(client) - before) / AT_ONCE


def _requests(case: Case) -> None:
    for each in [case.make() for _ in range(AT_ONCE)]:
        case.check(call(case.flask, each))


def _processor(client: redis.Redis) -> float:
    used: Any = client.info("cpu")
    return (float(used["used_cpu_user"]) + float(used["used_cpu_sys"])) * 1e6


def _commands(client: redis.Redis, case: Case) -> dict[str, float]:
    """Return the µs of each command of one request since the last reset. The server counts a script with its commands."""
    taken = _statistics(client)
    if case.app == PEER:
        return {name.upper(): usec / AT_ONCE for name, usec in taken.items()}
    if case.path != FIRST:
        return {"claim": taken["evalsha"] / AT_ONCE}
    claims = _claims(client, case)
    return {"claim": claims, "complete": taken["evalsha"] / AT_ONCE - claims}


def _statistics(client: redis.Redis) -> dict[str, float]:
    found: Any = client.info("commandstats")
    names = {name.removeprefix("cmdstat_"): float(each["usec"]) for name, each in found.items()}
    return {name: usec for name, usec in names.items() if not name.startswith(("info", "config"))}


def _claims(client: redis.Redis, case: Case) -> float:
    """Return the µs of the claim of one first request: what the scripts took before the view began."""
    view, before, taken = case.flask.view_functions["pay"], 0.0, 0.0

    def counting() -> Any:
        nonlocal taken
        taken += _statistics(client)["evalsha"] - before
        return view()

    case.flask.view_functions["pay"] = counting
    try:
        for each in [case.make() for _ in range(AT_ONCE)]:
            before = _statistics(client)["evalsha"]
            call(case.flask, each)
    finally:
        case.flask.view_functions["pay"] = view
    return taken / AT_ONCE


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in rounds for name in each)
    found = {name: median(each.get(name, 0.0) for each in rounds) for name in names}
    # A command of another thread, such as the renewal of a lease, is in few rounds.
    return {name: taken for name, taken in found.items() if taken}


BUFFER: Final = 1 << 20


class CountingProxy:
    """Forward a TCP port to the server, and count the turns: a client that speaks first, or again after the server.

    A turn is one round trip, whatever a client library calls it: a command, a pipeline, or a script.
    """

    def __init__(self, host: str, port: int) -> None:
        self.turns = 0
        self._server = host, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listening.getsockname()[1]
        return port

    def close(self) -> None:
        for each in self._open:
            # A thread may wait in it: close() alone would not wake it.
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._open += [client, server]
            spoke: list[bool] = [False]
            for source, sink, is_client in ((client, server, True), (server, client, False)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._forward, args=(source, sink, is_client, spoke), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_client: bool, spoke: list[bool]) -> None:
        try:
            while data := source.recv(BUFFER):
                if is_client and not spoke[0]:
                    self.turns += 1
                spoke[0] = is_client
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


@contextmanager
def counting_proxy(url: str) -> Iterator[tuple[CountingProxy, str]]:
    """Yield a proxy in front of the server, and the URL that leads through it."""
    parts = urlsplit(url)
    proxy = CountingProxy(parts.hostname or "127.0.0.1", parts.port or 6379)
    account = parts.netloc.rpartition("@")[0]
    host = f"{account}@127.0.0.1:{proxy.port}" if account else f"127.0.0.1:{proxy.port}"
    try:
        yield proxy, urlunsplit(parts._replace(netloc=host))
    finally:
        proxy.close()


def round_trips(proxy: CountingProxy, case: Case) -> float:
    """Count the round trips of one request. The number is exact on any machine."""
    case.check(call(case.flask, case.make()))
    before = proxy.turns
    for _ in range(COUNTED_REQUESTS):
        case.check(call(case.flask, case.make()))
    return (proxy.turns - before) / COUNTED_REQUESTS


def kept_keys(client: redis.Redis, app: Flask, *, path: str = "/payments", records: int = RECORDS) -> list[bytes]:
    """Send so many first requests. Return their Redis keys, without those that all requests share."""
    # Other applications may share the key space of this one.
    prefix = uuid4().hex
    call(app, environ("POST", path, body=PAYMENT, key=f"{prefix}-makes-what-all-share"))
    before = set(client.scan_iter(count=1000))
    for number in range(records):
        call(app, environ("POST", path, body=PAYMENT, key=f"{prefix}-{number}"))
    return sorted(set(client.scan_iter(count=1000)) - before)


def kept_bytes(client: redis.Redis, app: Flask) -> float:
    """Return the memory of all Redis keys that one request leaves."""
    return sum(client.memory_usage(key, samples=0) or 0 for key in kept_keys(client, app)) / RECORDS
