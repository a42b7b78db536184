"""`python3 run.py walk`: the functions of this package that one keyed POST crosses, in call order.

Read it to learn the way of a request. A test holds its length to a budget, and docs/contributing/walk.md shows it.
A call is an entry of a Python function of `flask_idempotency`; each step of a generator is an entry too.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from uuid import uuid4

from flask import Flask, Response, request
from werkzeug.test import EnvironBuilder, run_wsgi_app

import flask_idempotency
from benchmarks.apps import plain_installation
from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency
from tests.lab import postgres

PACKAGE = str(Path(flask_idempotency.__file__).parent)
STORES = ("memory", "redis", "sqlite", "postgres")
# The command that prepares an empty store.
READY = {"redis": ("redis", "init"), "sqlite": ("db", "upgrade"), "postgres": ("db", "upgrade")}
# Each outcome with the status of its response.
OUTCOMES = {"first": 201, "replay": 201, "conflict": 409}
BODY = json.dumps({"account": "acc_1", "amount": 1050, "currency": "EUR"}).encode()
# What a process does once (caches, connections, prepared statements) is over after a few requests.
WARM_UP_REQUESTS = 5
# Of several walks the shortest counts: a task that is due once a minute may fall into one of them.
WALKS = 3
WAIT_SECONDS = 10.0
# For one store. A machine may be busy.
PROCESS_SECONDS = 100.0


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `depth` counts the calls of this package that are open, this one included."""

    file: str
    function: str
    depth: int


@dataclass(frozen=True, slots=True)
class Walk:
    """The calls of one request, in order."""

    store: str
    outcome: str
    steps: tuple[Step, ...]

    @property
    def files(self) -> int:
        return len({step.file for step in self.steps})

    @property
    def depth(self) -> int:
        return max(step.depth for step in self.steps)


def walks(store: str, url: str) -> list[Walk]:
    """Trace each outcome on the store at this URL. The store must be empty."""
    entered, leave = Event(), Event()
    logging.disable(logging.WARNING)  # the store is not ready yet, and a new process says so
    try:
        app = _application(url, entered, leave)
        if store in READY:
            done = app.test_cli_runner().invoke(args=["idempotency", *READY[store]])
            if done.exit_code:
                raise RuntimeError(f"{store} is not ready: {done.output}")
    finally:
        logging.disable(logging.NOTSET)
    held, known = str(uuid4()), str(uuid4())
    first = Thread(target=_send, args=(app, "/held", held), daemon=True)
    first.start()
    try:
        if not entered.wait(WAIT_SECONDS):
            raise RuntimeError("The request that holds the key did not reach its view.")
        keys = {"first": lambda: str(uuid4()), "replay": lambda: known, "conflict": lambda: held}
        found = []
        for outcome, status in OUTCOMES.items():
            path = "/held" if outcome == "conflict" else "/payments"
            for _ in range(WARM_UP_REQUESTS):
                _send(app, path, keys[outcome]())
            traced = [_traced(app, path, keys[outcome](), status) for _ in range(WALKS)]
            found.append(Walk(store, outcome, min(traced, key=len)))
    finally:
        leave.set()
        first.join(WAIT_SECONDS)
    return found


def _application(url: str, entered: Event, leave: Event) -> Flask:
    app = Flask("walk")

    def pay() -> Response:
        return Response(b'{"id": 1}', 201 if request.get_json()["amount"] > 0 else 422, content_type="application/json")

    def held() -> Response:
        entered.set()
        leave.wait()
        return pay()

    app.add_url_rule("/payments", view_func=pay, methods=["POST"])
    app.add_url_rule("/held", view_func=held, methods=["POST"])
    Idempotency(app, principal=lambda: "alice", store=url, secret="walk-9f2c47d1e8b35a60", lease=30)
    return app


def _send(app: Flask, path: str, key: str) -> int:
    """Send one request as a server does: call the application, take the body, close it. Return the status."""
    builder = EnvironBuilder(path, method="POST", data=BODY, content_type="application/json")
    builder.headers["Idempotency-Key"] = key
    body, status, _ = run_wsgi_app(app.wsgi_app, builder.get_environ(), buffered=True)
    b"".join(body)
    return int(status[:3])


def _traced(app: Flask, path: str, key: str, expected: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    depth = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        steps.append(Step(code.co_filename[len(PACKAGE) + 1 :], code.co_qualname, depth))

    gc.disable()  # or finalizers of an earlier request run in this one
    sys.setprofile(profile)
    try:
        status = _send(app, path, key)
    finally:
        sys.setprofile(None)
        gc.enable()
    if status != expected:
        raise RuntimeError(f"{path} returned {status}, not {expected}: this is another walk.")
    return tuple(steps)


@contextmanager
def store_url(store: str) -> Iterator[str]:
    """Make an empty store that lasts as long as the context, and return its URL."""
    match store:
        case "memory":
            yield "memory://"
        case "redis":
            with RedisServer() as server:
                yield server.url
        case "sqlite":
            with tempfile.TemporaryDirectory(prefix="idempotency-") as folder:
                yield f"sqlite:///{folder}/walk.sqlite"
        case "postgres":
            with postgres.PostgresServer() as database_server, database_server.database() as name:
                yield database_server.url(name)
        case _:
            raise ValueError(f"There is no store {store!r}. Choose from {', '.join(STORES)}.")


def available() -> list[str]:
    """Return the stores of which this machine has the server."""
    return [store for store in STORES if store != "postgres" or postgres.installation() is not None]


def all_walks(stores: Sequence[str]) -> list[Walk]:
    """Trace every outcome on each of these stores, in a new process: loggers of this one may add calls."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return [walk for store in stores for walk in process.submit(_walks_on, store).result(PROCESS_SECONDS)]


def _walks_on(store: str) -> list[Walk]:
    with plain_installation(), store_url(store) as url:
        return walks(store, url)


def table(found: Sequence[Walk]) -> str:
    """Return the summary as a Markdown table, which reads well as text too."""
    lines = ["| store    | outcome  | calls | files | depth |", "| -------- | -------- | ----: | ----: | ----: |"]
    for walk in found:
        numbers = " | ".join(f"{number:5}" for number in (len(walk.steps), walk.files, walk.depth))
        lines.append(f"| {walk.store:8} | {walk.outcome:8} | {numbers} |")
    return "\n".join(lines)


def lines_of(walk: Walk) -> list[str]:
    """Return a line for each call, indented by its depth. Equal neighbours share a line."""
    runs = [(step, len(list(equal))) for step, equal in groupby(walk.steps)]
    return [
        f"{'  ' * step.depth}{step.file}:{step.function}{f' ×{number}' if number > 1 else ''}" for step, number in runs
    ]


def markdown(found: Sequence[Walk], shown: str = "redis") -> str:
    """Return the summary of all walks, and the walks on one store, as a part of a page."""
    blocks = [
        "\n".join([f"{walk.outcome.capitalize()}, {walk.store}:", "", "```text", *lines_of(walk), "```"])
        for walk in found
        if walk.store == shown
    ]
    return "\n\n".join([table(found), *blocks]) + "\n"


def text(found: Sequence[Walk]) -> str:
    """Return every walk, and the summary at the end, where a terminal shows it."""
    blocks = []
    for walk in found:
        numbers = f"calls={len(walk.steps)} files={walk.files} depth={walk.depth}"
        blocks.append("\n".join([f"## {walk.store}: {walk.outcome}  {numbers}", *lines_of(walk)]))
    return "\n\n".join([*blocks, table(found)]) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.py walk", description=__doc__)
    parser.add_argument("store", nargs="*", help=f"{', '.join(STORES)} (default: every store that this machine has)")
    parser.add_argument("--markdown", action="store_true", help="print docs/contributing/walk.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.store) - set(STORES):
        parser.error(f"there is no store {', '.join(sorted(unknown))}: choose from {', '.join(STORES)}")
    found = all_walks(options.store or available())
    print(markdown(found) if options.markdown else text(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
