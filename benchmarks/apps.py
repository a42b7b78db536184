"""The applications that are compared: one payments view, alone, with the Redis calls written by hand, and with ours.

By hand means what a developer who knows Redis puts into the view: `SET NX` and `SET` for a first request, `GET` for a
replay. No fingerprint, no scope, no lease, no headers kept, nothing that survives a crash: it is the floor of what the
round trips cost, not an alternative. It is two applications, because telling both paths apart in one would take one
more round trip, and a floor must be the lowest that can be stood on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import redis
from flask import Flask, Response, request

from benchmarks.payloads import ANSWER, LARGE_ANSWER, LIST_ANSWER
from flask_idempotency import Idempotency

APP, PRINCIPAL, SECRET = "benchmark", "alice", "benchmark-9f2c47d1e8b35a60"
LEASE_SECONDS = 30
KEEP_SECONDS = 24 * 3600
LOCATION = "/payments/ch_3MmlLrLkdIwHu7ix0snN0B15"

NOTHING: Mapping[str, Any] = MappingProxyType({})
View = Callable[[], Response]


class Gate:
    """Where `POST /held` stands until it may go on: how a request stays in flight while others are timed."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        self.left.wait()


def bare(pay: View | None = None, *, gate: Gate | None = None) -> Flask:
    """The payments service without any idempotency. `pay` replaces the view of `POST /payments`."""
    app = Flask(APP)

    def held() -> Response:
        if gate is not None:
            gate.wait()
        return answered()

    app.add_url_rule("/payments", view_func=pay or paid, methods=["POST"], endpoint="pay")
    app.add_url_rule("/held", view_func=held, methods=["POST"], endpoint="held")
    app.add_url_rule("/lists", view_func=listed, methods=["POST"], endpoint="listed")
    app.add_url_rule("/large", view_func=large, methods=["POST"], endpoint="large")
    app.add_url_rule("/payments/<payment>", view_func=shown, methods=["GET"], endpoint="shown")
    return app


def by_hand_writing(client: redis.Redis) -> Flask:
    """The floor of a first request, two round trips, and of a refused one."""

    def pay() -> Response:
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return paid()
        if not client.set("by-hand:" + key, b"", nx=True, ex=LEASE_SECONDS):
            return Response(b'{"title": "in flight"}', 409, content_type="application/problem+json")
        response = paid()
        client.set("by-hand:" + key, response.get_data(), ex=KEEP_SECONDS)
        return response

    return bare(pay)


def by_hand_reading(client: redis.Redis) -> Flask:
    """The floor of a replay: one round trip. A key that it does not know runs and is stored, so that there is one."""

    def pay() -> Response:
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return paid()
        stored = client.get("by-hand:" + key)
        if isinstance(stored, bytes):
            return answered(stored)
        response = paid()
        client.set("by-hand:" + key, response.get_data(), ex=KEEP_SECONDS)
        return response

    return bare(pay)


def ours(store: Any, *, gate: Gate | None = None, config: Mapping[str, Any] = NOTHING) -> Flask:
    """The same service with this library in front of it, on a Redis URL, a Redis client or a store."""
    app = bare(gate=gate)
    app.config.update(config)
    Idempotency(app, principal=lambda: PRINCIPAL, store=store, secret=SECRET, lease=LEASE_SECONDS)
    return app


def paid() -> Response:
    payment = request.get_json()
    return answered() if payment["amount"] > 0 else Response(status=422)


def listed() -> Response:
    return answered(LIST_ANSWER)


def large() -> Response:
    return answered(LARGE_ANSWER)


def shown(payment: str) -> Response:
    return Response(ANSWER, 200, content_type="application/json")


def answered(answer: bytes = ANSWER) -> Response:
    return Response(answer, 201, content_type="application/json", headers={"Location": LOCATION})


def served(name: str, url: str) -> Flask:
    """One of the applications for a server process: `gunicorn "benchmarks.apps:served('ours', 'redis://…')"`."""
    match name:
        case "bare":
            return bare()
        case "by hand, writing":
            return by_hand_writing(redis.Redis.from_url(url))
        case "by hand, reading":
            return by_hand_reading(redis.Redis.from_url(url))
        case "ours":
            return ours(url)
        case _:
            raise ValueError(f"there is no application called {name!r}")
