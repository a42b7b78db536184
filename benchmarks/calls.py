"""A request as a server hands it to a WSGI application, without the server: what is timed is the application alone.

Not Flask's test client, which costs more than the application does.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any
from uuid import uuid4

from flask import Flask

from benchmarks.apps import Gate

Environ = dict[str, Any]

# What a wedged application may take before the run fails.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: enough to tell a replay from a first answer, and a refusal from both."""

    status: int
    replayed: bool
    size: int


def environ(method: str, path: str, *, body: bytes = b"", key: str | None = None) -> Environ:
    """One request's environment. It can be used once: its body is a stream."""
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


def call(app: Flask, environ: Environ) -> Answer:
    """Everything that a server does with an application: call it, take the body, close it."""
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
    return Answer(int(status[:3]), any(name == "Idempotency-Replayed" for name, _ in headers), size)


@contextmanager
def in_flight(app: Flask, gate: Gate, body: bytes) -> Iterator[str]:
    """A key whose first request is running for as long as this lasts, at `POST /held`."""
    key = str(uuid4())
    first = Thread(target=call, args=(app, environ("POST", "/held", body=body, key=key)), daemon=True)
    first.start()
    try:
        if not gate.entered.wait(PATIENCE_SECONDS):
            raise RuntimeError("the request that was to be in flight never reached its view")
        yield key
    finally:
        gate.left.set()
        first.join(PATIENCE_SECONDS)
