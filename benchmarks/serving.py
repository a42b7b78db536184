"""Under gunicorn: requests per second of one gthread worker, 8 threads, 8 connections from another process."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from uuid import uuid4

from benchmarks import report
from benchmarks.apps import PAYMENT
from benchmarks.harness import Cores, pin
from benchmarks.report import Row, Section, Verdict, at_least

THREADS = 8
CONNECTIONS = 8
START_SECONDS = 120.0
# On a stalled machine a connection must survive the pause between two requests.
KEEP_ALIVE_SECONDS = 30

NOTE = (
    f"gunicorn gthread, 1 worker, {THREADS} threads, {CONNECTIONS} keep-alive connections. Medians of interleaved rounds; "
    "each ratio is within a round. A request also pays for gunicorn here."
)


@dataclass(slots=True)
class Served:
    """An application in its server, and one kind of request to it."""

    name: str
    application: str
    key: str | None
    kind: str
    rates: list[float] = field(default_factory=list)

    def of(self, other: Served) -> float:
        return median(mine / its for mine, its in zip(self.rates, other.rates, strict=True))


def section(url: str, cores: Cores, *, rounds: int, seconds: float) -> Section:
    known = str(uuid4())
    served = [
        Served("bare Flask", "bare", None, "201"),
        Served("by hand: first", "by hand, writing", None, "201"),
        Served("by hand: replay", "by hand, reading", known, "201"),
        Served("ours: first", "ours", None, "201"),
        Served("ours: replay", "ours", known, "201 replayed"),
    ]
    with ExitStack() as running:
        ports = {
            name: running.enter_context(_gunicorn(name, url, cores))
            for name in dict.fromkeys(each.application for each in served)
        }
        for each in served:
            _rate(each, ports[each.application], cores, seconds=min(0.5, seconds), checked=False)
        for _ in range(rounds):
            for each in random.sample(served, len(served)):
                each.rates.append(_rate(each, ports[each.application], cores, seconds=seconds))
    bare, first, replay = served[0], served[1], served[2]
    floors = {"ours: first": first, "ours: replay": replay}
    return Section("Requests per second", NOTE, [_row(each, bare, floors.get(each.name)) for each in served])


def _row(each: Served, bare: Served, floor: Served | None) -> Row:
    cells: dict[str, float | str] = {"requests/s": median(each.rates), "of bare": each.of(bare)}
    if floor is not None:
        cells["of by hand"] = each.of(floor)
    verdicts: list[Verdict] = []
    if each.name == "ours: first":
        verdicts = [at_least("≥ 0.55 of bare", each.of(bare), report.FIRST_OF_BARE_RATE)]
    if each.name == "ours: replay":
        verdicts = [at_least("≥ 0.80 of bare", each.of(bare), report.REPLAY_OF_BARE_RATE)]
    return Row(each.name, cells, verdicts)


def _rate(each: Served, port: int, cores: Cores, *, seconds: float, checked: bool = True) -> float:
    command = [sys.executable, "-m", "benchmarks.load", "--port", str(port), "--seconds", str(seconds)]
    command += ["--connections", str(CONNECTIONS)]
    command += ["--key", each.key] if each.key is not None else []
    command += ["--core", str(cores.load)] if cores.load is not None else []
    measured = json.loads(subprocess.run(command, input=PAYMENT, capture_output=True, check=True).stdout)
    if checked and set(measured["kinds"]) != {each.kind}:
        raise RuntimeError(f"{each.name}: got {measured['kinds']}, expected only {each.kind}")
    rate: float = measured["rate"]
    return rate


@contextmanager
def _gunicorn(name: str, url: str, cores: Cores) -> Iterator[int]:
    """Serve the named application on a free port. Yield the port."""
    port = _free_port()
    command = [sys.executable, "-m", "gunicorn", "--worker-class", "gthread", "--workers", "1"]
    command += ["--threads", str(THREADS), "--keep-alive", str(KEEP_ALIVE_SECONDS), "--bind", f"127.0.0.1:{port}"]
    command += ["--log-level", "warning", "--no-control-socket", f"benchmarks.apps:served({name!r}, {url!r})"]
    server = subprocess.Popen(command)
    try:
        pin(server.pid, cores.application)
        _wait_until_it_answers(server, port)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as line:
                line.sendall(b"GET /payments/1 HTTP/1.1\r\nHost: benchmark\r\nConnection: close\r\n\r\n")
                if line.recv(12).endswith(b"200"):
                    return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("gunicorn did not start. Its log is above.")
