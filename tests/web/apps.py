"""Guarded applications for tests, and what their stores were asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, request
from flask import Response as FlaskResponse
from flask.testing import FlaskClient
from werkzeug.test import TestResponse, create_environ, run_wsgi_app
from werkzeug.wrappers import Response

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.model import Record, State, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.extension import Idempotency
from flask_idempotency.signals import SIGNALS
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.web.responses import CapturedResponse, capture, replay

KEY = "Idempotency-Key"

LONG = "s-9f2c47d1e8b35a60c1d47be2a5583f09"
"""A secret that is strong enough for encryption `required`."""


class FaultyMemory(FaultyStore):
    """Its line can be cut for claims; what it counts and keeps besides is always there."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.ledger = store.ledger
        self.data_keys = store.data_keys
        self.responses = store.responses
        self.recovery = store.recovery
        self.expiry = store.expiry
        self.task_log = store.task_log


@dataclass
class World:
    """One guarded application, its store, and everything that was told."""

    app: Flask
    store: FaultyMemory
    clock: FrozenClock
    idempotency: Idempotency
    runs: list[Any] = field(default_factory=list)
    """What views append to when they run."""
    events: list[Event] = field(default_factory=list)

    def client(self, **options: Any) -> FlaskClient:
        return self.app.test_client(**options)

    def post(self, path: str = "/", key: str | None = "k", **options: Any) -> TestResponse:
        """A keyed POST by a client without cookies, which reads the whole answer."""
        options.setdefault("buffered", True)
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers[KEY] = key
        return self.app.test_client(use_cookies=False).post(path, headers=headers, **options)

    def view(self, path: str = "/", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a POST view."""
        return self.app.post(path, **options)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    def record(self) -> Record | None:
        """The record that the last call was about."""
        return self.store.read(self.store.calls[-1].key)

    def state(self) -> State | None:
        """How the key of the last call stands."""
        record = self.record()
        return None if record is None else record.state

    def settled(self) -> list[str]:
        """The verbs that ended claims, in order."""
        return [verb for verb in self.store.verbs() if verb in ("complete", "release", "quarantine")]


def who() -> str | None:
    """A principal loader: whoever X-User names."""
    return request.headers.get("X-User", "alice") or None


def new_world(
    app: Flask | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    principal: Callable[[], str | None] | None = who,
    init: bool = True,
    store: FaultyMemory | None = None,
    secret: Any = None,
    **policy: Any,
) -> World:
    """An application that does not propagate exceptions, as in production, unless `config` says otherwise."""
    app = app or Flask("tests.web.app")
    app.config.update({"SECRET_KEY": "s", "TESTING": True, "PROPAGATE_EXCEPTIONS": False, **(config or {})})
    if secret is None:
        secret = ("s" if app.testing and policy.get("encryption") != "required" else LONG,)
    clock = FrozenClock()
    store = store or FaultyMemory(MemoryStore(clock=clock))
    idempotency = Idempotency(principal=principal, store=store, secret=secret, **policy)
    world = World(app, store, clock, idempotency)

    def remember(sender: Any, event: Event) -> None:
        world.events.append(event)

    for signal in SIGNALS.values():
        signal.connect(remember, sender=app)
    app.extensions["keeps receivers alive"] = remember
    if init:
        idempotency.init_app(app)
    return world


def pairs(response: TestResponse) -> list[tuple[str, str]]:
    """The header fields, without what marks a replay."""
    return sorted((n, v) for n, v in response.headers if n not in ("Idempotency-Replayed", "Cache-Control"))


def is_replay(response: Response) -> bool:
    return response.headers.get("Idempotency-Replayed") == "true"


@dataclass(frozen=True)
class Sent:
    """What a server is handed."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.headers if field == name]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """In any order, and without the length: a stream has none, its replay has."""
        return sorted(pair for pair in self.headers if pair[0] != "Content-Length")


class Remembering:
    """An application with one view, whose answer can be had again by asking for it with `replay()`."""

    def __init__(
        self,
        view: Callable[[], Any],
        *,
        policy: Policy | None = None,
        response_class: type[FlaskResponse] = FlaskResponse,
    ) -> None:
        self.policy = policy or Policy()
        self.captured: CapturedResponse | None = None
        self.app = app = Flask(__name__)
        app.response_class = response_class
        app.post("/")(view)

        @app.before_request
        def again() -> Response | None:
            if "Replay" not in request.headers:
                return None
            return replay(self.result, policy=self.policy, response_class=app.response_class)

        @app.after_request
        def snap(response: FlaskResponse) -> FlaskResponse:
            if "Replay" not in request.headers:
                self.captured = capture(response, self.policy, on_end=lambda end: None, abandoned=deque())
            return response

    @property
    def result(self) -> StoredResponse:
        assert self.captured is not None
        assert self.captured.result is not None
        codec = EnvelopeCodec()
        return codec.unwrap(codec.wrap(self.captured.result))

    def post(self, *, read: bool = True) -> Sent:
        return self._sent({}, read=read)

    def replay(self) -> Sent:
        return self._sent({"Replay": "please"}, read=True)

    def _sent(self, headers: dict[str, str], *, read: bool) -> Sent:
        environ = create_environ(method="POST", headers=headers)
        body, status, fields = run_wsgi_app(self.app, environ, buffered=read)
        return Sent(status, list(fields), b"".join(body) if read else b"")
