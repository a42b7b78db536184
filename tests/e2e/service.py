"""The victim: a small application whose views do what each request's `X-Steps` header says, one step after the other.

Steps are in a header because headers are no part of a request's identity: a retry may be told to do something else.

    pause        say so, and wait for the go-ahead; `pause:<name>` has one of its own
    point        pass the point of no return
    effect       do to the outside world what must not be done twice
    take:<n>     be busy for so many milliseconds
    spin         compute until killed
    ask:<path>   call this service itself, with the same key and body
    flood        stream without end
    sized        announce the length of a stream
    size:<n>     answer with this many bytes
    status:<n>   answer with this status
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from flask import Flask, Response, abort, current_app, g, request, send_file

from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.engine.recovery import Resolution, UnknownOutcome
from tests.e2e.ledger import Ledger

SECRET = "what only the service knows: 9f2c47d1e8b35a60c1d47be2"
"""Not a secret to keep: every server of one test must derive the same names."""

CASE = "X-Case"
STEPS = "X-Steps"

VIEWS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "marked": {"effects": "marked"},
    "deduplicated": {"effects": "deduplicated"},
    "takeover": {"on_abandoned": "takeover"},
    "required": {"required": True},
    "wait": {"in_flight": "wait"},
    "wait-deduplicated": {"in_flight": "wait", "effects": "deduplicated"},
    "allow": {"on_store_down": "allow"},
    "quarantine": {"on_error": "quarantine"},
}
"""Path → policy. All of them run `perform`."""


def from_environment() -> Flask:
    """What servers are told to serve."""
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    return create_app(
        store=os.environ["E2E_STORE"],
        ledger=os.environ["E2E_LEDGER"],
        config=json.loads(os.environ.get("E2E_CONFIG", "{}")),
    )


def create_app(
    *,
    store: str,
    ledger: str,
    config: Mapping[str, Any],
    resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]] = MappingProxyType({}),
) -> Flask:
    """One victim. `config` is Flask configuration, `IDEMPOTENCY_*` included; `resolvers` are by endpoint."""
    app = Flask("victim")
    app.config.update(IDEMPOTENCY_STORE=store, IDEMPOTENCY_SECRET=SECRET, LEDGER=Ledger(ledger))
    # Tests count, hold and lose the calls of requests, and would take one that adds counts for one of these.
    app.config.update(IDEMPOTENCY_ACTIVITY=False)
    # Some of its callers sign in with a tenant alone.
    app.config.update(IDEMPOTENCY_ALLOW_ANONYMOUS=True, **config)
    idempotency = Idempotency(app, principal=lambda: g.principal, tenant=lambda: g.tenant)
    for endpoint, resolver in resolvers.items():
        idempotency.resolver(endpoint)(resolver)

    # After the extension on purpose: its claims must wait for the application's own authentication wherever that is.
    @app.before_request
    def sign_in() -> None:
        tenant, _, principal = request.headers.get("Authorization", "").removeprefix("Bearer ").partition("/")
        g.tenant, g.principal = tenant or None, principal or None
        if g.principal is None and request.path.startswith("/private"):
            abort(401)

    for path, policy in VIEWS.items():
        methods = ["POST", "PUT", "PATCH", "DELETE"]
        app.add_url_rule(f"/{path}", path, idempotent(**policy)(_view()), methods=methods)
    app.add_url_rule("/private", "private", _view(), methods=["POST"])
    app.add_url_rule("/slash/", "slash", _view(), methods=["POST"])
    app.add_url_rule("/json", "json", parse_json, methods=["POST"])
    app.add_url_rule("/form", "form", parse_form, methods=["POST"])
    app.add_url_rule("/stream", "stream", stream, methods=["POST"])
    app.add_url_rule("/file", "file", file, methods=["POST"])
    app.add_url_rule("/free", "free", lambda: {"pid": os.getpid()})
    if app.config.get("WARM_UP"):
        # Threads and connections made before a fork are the ones that a fork breaks.
        app.test_client().post("/plain", headers={"Idempotency-Key": uuid4().hex})
    return app


def _view() -> Any:
    # Annotations belong to one function object, so every path has its own.
    def view() -> Response:
        return perform()

    return view


def perform() -> Response:
    """Do the steps. The answer is unlike that of any other run, so that equal bytes mean the same run."""
    ledger, case = _ledger(), request.headers.get(CASE, "")
    ledger.note("run", case, os.getpid())
    answer: dict[str, Any] = {"run": uuid4().hex, "pid": os.getpid(), "caller": g.principal}
    status, padding = 201, ""
    for step in request.headers.get(STEPS, "").split():
        match step.partition(":")[::2]:
            case ("pause", which):
                ledger.pause(f"{case}{which}", os.getpid())
            case ("point", _):
                current_claim.point_of_no_return()
            case ("effect", _):
                ledger.act(case, current_claim.downstream_key("effect") if current_claim else "")
            case ("take", milliseconds):
                time.sleep(int(milliseconds) / 1000)
            case ("spin", _):
                ledger.note("paused", case, os.getpid())
                while True:
                    pass
            case ("ask", path):
                answer["asked"] = _ask_ourselves(path)
            case ("size", size):
                padding = "x" * int(size)
            case ("status", number):
                status = int(number)
            case _:
                raise ValueError("there is no such step")
    return current_app.response_class(json.dumps({**answer, "padding": padding}), status, mimetype="application/json")


def parse_json() -> dict[str, Any]:
    """What most JSON views do first."""
    _ledger().note("run", request.headers.get(CASE, ""), os.getpid())
    return {"run": uuid4().hex, "type": type(request.get_json()).__name__}


def parse_form() -> dict[str, Any]:
    """What most form views do first."""
    _ledger().note("run", request.headers.get(CASE, ""), os.getpid())
    return {"run": uuid4().hex, "fields": sorted(request.form), "files": sorted(request.files)}


def stream() -> Response:
    """Two lines with a pause between them, and a third that says which run this is."""
    ledger, case = _ledger(), request.headers.get(CASE, "")
    ledger.note("run", case, os.getpid())
    steps = request.headers.get(STEPS, "").split()

    def chunks() -> Iterator[str]:
        try:
            yield "first\n"
            ledger.pause(case, os.getpid())
            yield "second\n"
            while (
                "flood" in steps
            ):  # until the server notices that nobody listens; waitress does when its buffers are full
                yield "x" * 65536
            yield uuid4().hex
        except GeneratorExit:
            ledger.note("closed", case, os.getpid())
            raise

    response = Response(chunks(), mimetype="text/plain")
    if "sized" in steps:
        response.content_length = len("first\nsecond\n") + len(uuid4().hex)
    return response


def file() -> Response:
    """A file that somebody made, by the server's own means."""
    _ledger().note("run", request.headers.get(CASE, ""), os.getpid())
    return send_file(request.headers["X-File"], mimetype="application/octet-stream")


def _ask_ourselves(path: str) -> int:
    """The status that this service gives to the same request while it is being handled."""
    headers = {name: request.headers[name] for name in ("Idempotency-Key", "Content-Type", CASE)}
    again = urllib.request.Request(
        f"http://127.0.0.1:{request.environ['SERVER_PORT']}{path}", data=request.get_data(), headers=headers
    )
    try:
        with urllib.request.urlopen(again, timeout=60) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _ledger() -> Ledger:
    ledger: Ledger = current_app.config["LEDGER"]
    return ledger
