"""Under gunicorn: requests per second of one gthread worker, 8 threads, 8 connections from another process."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from urllib.request import urlopen

import redis
from flask import Flask, Response

from benchmarks.apps import Gate, plain_installation
from benchmarks.harness import EXPECTED, FIRST, REPLAY, Case, Cores, pin
from benchmarks.paths import APPLICATIONS

THREADS = 8
CONNECTIONS = 8
START_SECONDS = 120.0
WARM_UP_SECONDS = 0.5
# On a stalled machine a connection must survive the pause between two requests.
KEEP_ALIVE_SECONDS = 30
PROCESSOR = "/processor"


@dataclass(slots=True)
class Served:
    """One case under gunicorn, by round: requests/s, times of a request and processor time of the worker in µs."""

    case: Case
    rates: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(self.rates)

    def rate_of(self, other: Served) -> float:
        """Return the median of the ratios within each round."""
        return median(mine / its for mine, its in zip(self.rates, other.rates, strict=True))


def serve(cases: Sequence[Case], url: str, cores: Cores, *, rounds: int, seconds: float) -> list[Served]:
    """Measure these cases in the servers of their applications, in interleaved rounds.

    A key in flight is held by this process: the servers share its Redis.
    """
    served = [Served(case) for case in cases]
    with ExitStack() as running:
        ports = {
            name: running.enter_context(_gunicorn(name, url, cores)) for name in dict.fromkeys(c.app for c in cases)
        }
        for each in served:
            _drive(each, ports[each.case.app], cores, seconds=min(WARM_UP_SECONDS, seconds))
        for each in served:
            for taken in (each.rates, each.p50, each.p99, each.processor):
                taken.clear()
        for _ in range(rounds):
            for each in random.sample(served, len(served)):
                _drive(each, ports[each.case.app], cores, seconds=seconds)
    return served


def application(name: str, url: str) -> Flask:
    """Return an application for a server process: `gunicorn "benchmarks.serving:application('ours', 'redis://…')"`."""
    plain_installation().start()
    app = APPLICATIONS[name](redis.Redis.from_url(url), url, Gate())
    app.add_url_rule(PROCESSOR, view_func=lambda: Response(str(time.process_time_ns())))
    return app


def _drive(each: Served, port: int, cores: Cores, *, seconds: float) -> None:
    request = each.case.make()
    command = [sys.executable, "-m", "benchmarks.load", "--port", str(port), "--seconds", str(seconds)]
    command += [
        "--connections",
        str(CONNECTIONS),
        "--method",
        request["REQUEST_METHOD"],
        "--path",
        request["PATH_INFO"],
    ]
    command += ["--core", str(cores.load)] if cores.load is not None else []
    if "HTTP_IDEMPOTENCY_KEY" not in request:
        command += ["--no-key"]
    elif each.case.path != FIRST:
        command += ["--key", request["HTTP_IDEMPOTENCY_KEY"]]
    before = _processor(port)
    ended = subprocess.run(command, input=request["wsgi.input"].read(), capture_output=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{each.case.app}, {each.case.path}: {ended.stderr.decode()}")
    used, measured = _processor(port) - before, json.loads(ended.stdout)
    kind = str(EXPECTED[each.case.path]) + (" replayed" if each.case.path == REPLAY else "")
    if set(measured["kinds"]) != {kind}:
        raise RuntimeError(f"{each.case.app}, {each.case.path}: got {measured['kinds']}, expected only {kind}")
    each.rates.append(measured["rate"])
    each.p50.append(measured["p50"])
    each.p99.append(measured["p99"])
    each.processor.append(used / measured["kinds"][kind])


def _processor(port: int) -> float:
    """Return the processor time of the worker in µs. There is one."""
    with urlopen(f"http://127.0.0.1:{port}{PROCESSOR}", timeout=START_SECONDS) as response:
        return int(response.read()) / 1000


@contextmanager
def _gunicorn(name: str, url: str, cores: Cores) -> Iterator[int]:
    """Serve the named application on a free port. Yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "--worker-class", "gthread", "--workers", "1"]
        command += ["--threads", str(THREADS), "--keep-alive", str(KEEP_ALIVE_SECONDS)]
        # The bound socket, because another program may take a port that was only looked up.
        command += ["--bind", f"fd://{listener.fileno()}", "--log-level", "warning", "--no-control-socket"]
        command += [f"benchmarks.serving:application({name!r}, {url!r})"]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()])
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
