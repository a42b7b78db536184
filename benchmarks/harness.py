"""How a run times an application: requests without a server, in interleaved rounds, each process on its core.

A request reaches the WSGI application as a server would hand it over. Flask's test client costs more than the application.
"""

from __future__ import annotations

import gc
import io
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter_ns, thread_time_ns
from typing import Any
from uuid import uuid4

import redis
from flask import Flask

from benchmarks.apps import ANSWER, Gate

BARE, BY_HAND, OURS, PEER, OURS_MEMORY = "bare Flask", "by hand", "ours", "Powertools", "ours, memory"
EMPTY_HOOKS = "four empty hooks"
UNCOMPRESSED = "ours, compression off"
GET, NO_KEY, FIRST, REPLAY, CONFLICT, MISMATCH = "GET", "POST, no key", "first", "replay", "conflict", "mismatch"
PATHS = (GET, NO_KEY, FIRST, REPLAY, CONFLICT, MISMATCH)
OUTCOMES = (FIRST, REPLAY, CONFLICT, MISMATCH)

# The status of each path.
EXPECTED = {GET: 200, NO_KEY: 201, FIRST: 201, REPLAY: 201, CONFLICT: 409, MISMATCH: 422}

Environ = dict[str, Any]

# After this the run fails: the application hangs.
PATIENCE_SECONDS = 10.0
# Enough for pools, caches and the specialising interpreter.
WARM_UP_REQUESTS = 50
# Some process starts now and then, but none runs all the time.
IDLE_LOAD = 0.7

BUSY = (
    "Other processes use this machine. After a round trip a request then finds its core busy and its caches cold, and the "
    "more code it runs, the more that costs. So rows with round trips look far worse than they are. Counts, sizes, and rows "
    "without round trips hold."
)


@dataclass(frozen=True, slots=True)
class Received:
    """A response in short: enough to tell a replay from a first response, and a refusal from both."""

    status: int
    replayed: bool
    size: int


def environ(method: str, path: str, *, body: bytes = b"", key: str | None = None) -> Environ:
    """Return the environment of one request. Use it once: its body is a stream."""
    made: Environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "RAW_URI": path,
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "8000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "SERVER_SOFTWARE": "benchmark",
        "REMOTE_ADDR": "127.0.0.1",
        "REMOTE_PORT": "40000",
        "HTTP_HOST": "api.example:8000",
        "HTTP_USER_AGENT": "payments-client/4.2 (python 3.11)",
        "HTTP_ACCEPT": "application/json",
        "HTTP_ACCEPT_ENCODING": "gzip, deflate",
        "HTTP_CONNECTION": "keep-alive",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        "wsgi.input_terminated": True,
    }
    if body:
        made["CONTENT_TYPE"] = "application/json"
        made["CONTENT_LENGTH"] = str(len(body))
    if key is not None:
        made["HTTP_IDEMPOTENCY_KEY"] = key
    return made


def call(app: Flask, environ: Environ) -> Received:
    """Do what a server does with an application: call it, take the body, close it."""
    started: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        started[:] = (status, headers)
        return None

    body = app.wsgi_app(environ, start_response)
    try:
        size = sum(map(len, body))
    finally:
        if hasattr(body, "close"):
            body.close()
    status, headers = started
    return Received(int(status[:3]), any(name == "Idempotency-Replayed" for name, _ in headers), size)


@contextmanager
def in_flight(app: Flask, gate: Gate, body: bytes) -> Iterator[str]:
    """Yield a key whose first request runs at `POST /held` until the end of the block."""
    key = str(uuid4())
    first = Thread(target=call, args=(app, environ("POST", "/held", body=body, key=key)), daemon=True)
    first.start()
    try:
        if not gate.entered.wait(PATIENCE_SECONDS):
            raise RuntimeError("The request that holds the key did not reach its view.")
        yield key
    finally:
        gate.left.set()
        first.join(PATIENCE_SECONDS)


@dataclass(frozen=True, slots=True)
class Case:
    """One path through one application. `make` returns a new request."""

    app: str
    path: str
    flask: Flask
    make: Callable[[], Environ]

    def check(self, received: Received) -> None:
        """Raise if the response belongs to another path: the time of a wrong response says nothing."""
        whole = received.size == len(ANSWER) or received.status >= 400
        if (received.status, received.replayed, whole) != (EXPECTED[self.path], self.path == REPLAY, True):
            raise RuntimeError(f"{self.app}, {self.path}: got {received}")


@dataclass(slots=True)
class Timing:
    """The times of one case in µs: of each request by round, and the processor time of a round's average request."""

    case: Case
    rounds: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        return [median(taken) for taken in self.rounds]

    @property
    def typical(self) -> float:
        return median(self.medians)

    @property
    def rate(self) -> float:
        """Return the requests per second of one thread."""
        return median(len(taken) * 1e6 / sum(taken) for taken in self.rounds)

    def quantile(self, part: float) -> float:
        """Return this quantile of all requests of all rounds."""
        return quantile([time for each in self.rounds for time in each], part)

    def ratio_to(self, floor: Timing) -> float:
        """Return the median of the ratios within each round. What slows down a whole round cancels out."""
        return median(mine / its for mine, its in zip(self.medians, floor.medians, strict=True))

    def added_to(self, floor: Timing) -> float:
        return median(mine - its for mine, its in zip(self.medians, floor.medians, strict=True))

    def processor_ratio_to(self, floor: Timing) -> float:
        return median(mine / its for mine, its in zip(self.processor, floor.processor, strict=True))

    def processor_added_to(self, floor: Timing) -> float:
        return median(mine - its for mine, its in zip(self.processor, floor.processor, strict=True))


def quantile(taken: Sequence[float], part: float) -> float:
    ordered = sorted(taken)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def measure(cases: Sequence[Case], *, rounds: int, requests: int) -> list[Timing]:
    """Time every case in every round, in a random order. Raise if a response belongs to another path."""
    timings = [Timing(case) for case in cases]
    for case in cases:
        _take(case, WARM_UP_REQUESTS)
    # These objects live to the end. The collector must not visit them in the middle of a request.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(rounds):
            for timing in random.sample(timings, len(timings)):
                taken, processor = _take(timing.case, requests)
                timing.rounds.append(taken)
                timing.processor.append(processor)
    finally:
        gc.unfreeze()
    return timings


def _take(case: Case, requests: int) -> tuple[list[float], float]:
    app = case.flask
    environs = [case.make() for _ in range(requests)]
    taken, received = [], []
    processor = thread_time_ns()
    for environ in environs:
        began = perf_counter_ns()
        received.append(call(app, environ))
        taken.append((perf_counter_ns() - began) / 1000)
    processor = thread_time_ns() - processor
    for each in received:
        case.check(each)
    return taken, processor / 1000 / requests


def timed(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the seconds of processor time and of wall time for one call."""
    began, used = perf_counter_ns(), thread_time_ns()
    for _ in range(times):
        call()
    return (thread_time_ns() - used) / times / 1e9, (perf_counter_ns() - began) / times / 1e9


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of each process, so that client and server do not compete. None means any core."""

    application: int | None = None
    store: int | None = None
    load: int | None = None


def choose_cores() -> Cores:
    if not hasattr(os, "sched_setaffinity"):
        return Cores()
    free: Sequence[int] = sorted(os.sched_getaffinity(0))
    if len(free) < 2:
        return Cores()
    # The load generator shares the core of the store, because the application is what a run measures.
    return Cores(application=free[0], store=free[1], load=free[2] if len(free) > 2 else free[1])


def pin(pid: int, core: int | None) -> None:
    """Bind a process, or this thread for 0, and its later children to a core. None changes nothing."""
    if core is not None:
        os.sched_setaffinity(pid, {core})


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Bind this process to a core until the end of the block."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(0, core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe(client: redis.Redis, cores: Cores) -> dict[str, str]:
    """Return what a reader of the numbers must know about the machine."""
    server: dict[str, Any] = client.info("server")
    name, number = "Valkey", server.get("valkey_version")
    if number is None:
        name, number = "Redis", server["redis_version"]
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "pinned": "yes" if cores.application is not None else "no",
        "python": platform.python_version(),
        "flask": version("flask"),
        "redis-py": version("redis"),
        "hiredis": version("hiredis") if _has_hiredis() else "absent",
        "server": f"{name} {number}",
        "load before": f"{os.getloadavg()[0]:.1f}" + ("" if is_idle() else " (NOT IDLE: see below)"),
    }


def is_idle() -> bool:
    """Return True if no other process seems to need a core for long."""
    return os.getloadavg()[0] < IDLE_LOAD


def _has_hiredis() -> bool:
    from redis.utils import HIREDIS_AVAILABLE

    return bool(HIREDIS_AVAILABLE)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
