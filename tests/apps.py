"""The guarded applications that tests build, and the commands that tests run on them."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Flask, request
from flask import Response as FlaskResponse
from flask.testing import FlaskClient
from werkzeug.test import TestResponse, create_environ, run_wsgi_app
from werkzeug.wrappers import Response

from flask_idempotency.assembly import identities
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import Scope, StorageKey, new_token
from flask_idempotency.engine.model import (
    ClaimRequest,
    Grant,
    OnExpiry,
    Record,
    RequestInfo,
    State,
    StoredPayload,
    StoredResponse,
)
from flask_idempotency.engine.observations import Ending, Observations, Observed
from flask_idempotency.engine.policy import Policy
from flask_idempotency.extension import Idempotency
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.signals import SIGNALS
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.web.problems import Problem
from flask_idempotency.web.problems import render as plain
from flask_idempotency.web.responses import CapturedResponse, capture, replay

KEY = "Idempotency-Key"

LONG = "s-9f2c47d1e8b35a60c1d47be2a5583f09"
"""A secret that is strong enough for encryption `required`."""


class FaultyObservations:
    """Observations that fail while `fault` is an exception. `calls` has the names of all calls."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self.fault: Exception | None = None
        self.calls: list[str] = []

    def observe(self, key: StorageKey, **about: Any) -> Observed:
        self._pass("observe")
        return self._observations.observe(key, **about)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._pass("renew")
        self._observations.renew(key, token, lease=lease)

    def end(self, key: StorageKey, token: bytes, ending: Ending, *, keep: float) -> None:
        self._pass("end")
        self._observations.end(key, token, ending, keep=keep)

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault


class FaultyMemory(FaultyStore):
    """A store whose claims and observations can fail; its ledger, data keys and recovery always work."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.ledger = store.ledger
        self.audit = store.audit
        self.data_keys = store.data_keys
        self.responses = store.responses
        self.recovery = store.recovery
        self.expiry = store.expiry
        self.task_log = store.task_log
        self.activity = store.activity
        self.observations = FaultyObservations(store.observations)


@dataclass
class World:
    """One guarded application, its store and the events that it sent."""

    app: Flask
    store: FaultyMemory
    clock: FrozenClock
    idempotency: Idempotency
    runs: list[Any] = field(default_factory=list)
    """Views append to it when they run."""
    events: list[Event] = field(default_factory=list)

    def client(self, **options: Any) -> FlaskClient:
        return self.app.test_client(**options)

    def post(self, path: str = "/", key: str | None = "k", **options: Any) -> TestResponse:
        """Send a keyed POST from a client without cookies, and read the whole response."""
        options.setdefault("buffered", True)
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers[KEY] = key
        return self.app.test_client(use_cookies=False).post(path, headers=headers, **options)

    def view(self, path: str = "/", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a POST view."""
        return self.app.post(path, **options)

    @contextmanager
    def running(self, path: str = "/slow", **options: Any) -> Iterator[threading.Event]:
        """Send a request whose view runs until the block ends, or until the event that the block gets is set."""
        begun, go_on = threading.Event(), threading.Event()

        @self.view(path)
        def slow() -> str:
            begun.set()
            assert go_on.wait(60)
            return "done"

        worker = threading.Thread(target=self.post, args=(path,), kwargs=options)
        worker.start()
        try:
            assert begun.wait(60)
            yield go_on
        finally:
            go_on.set()
            worker.join(60)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    def record(self) -> Record | None:
        """Return the record of the last store call."""
        return self.store.read(self.store.calls[-1].key)

    def state(self) -> State | None:
        """Return the state of the last call's key."""
        record = self.record()
        return None if record is None else record.state

    def settled(self) -> list[str]:
        """Return the store calls that ended claims, in order."""
        return [verb for verb in self.store.verbs() if verb in ("complete", "release", "quarantine")]


def record_events(app: Flask, events: list[Event]) -> None:
    """Append each event of this application to the list.

    One function receives for all applications. Blinker takes a dead receiver out in whatever thread collects it, often the
    lease thread, and raises "dictionary changed size during iteration" if a test connects one at that moment.
    """
    app.extensions["tests record events"] = events
    for signal in SIGNALS.values():
        signal.connect(_record, sender=app)


def _record(sender: Flask, event: Event) -> None:
    sender.extensions["tests record events"].append(event)


def who() -> str | None:
    """Load the principal from X-User."""
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
    """Build an application that does not propagate exceptions, as in production, unless `config` sets it."""
    app = app or Flask("tests.web.app")
    app.config.update({"SECRET_KEY": "s", "TESTING": True, "PROPAGATE_EXCEPTIONS": False, **(config or {})})
    if secret is None:
        secret = ("s" if app.testing and policy.get("encryption") != "required" else LONG,)
    clock = FrozenClock()
    store = store or FaultyMemory(MemoryStore(clock=clock))
    idempotency = Idempotency(principal=principal, store=store, secret=secret, **policy)
    world = World(app, store, clock, idempotency)

    record_events(app, world.events)
    if init:
        idempotency.init_app(app)
    return world


def pairs(response: TestResponse) -> list[tuple[str, str]]:
    """Return the header fields, without those that mark a replay."""
    return sorted((n, v) for n, v in response.headers if n not in ("Idempotency-Replayed", "Cache-Control"))


def is_replay(response: Response) -> bool:
    return response.headers.get("Idempotency-Replayed") == "true"


@dataclass(frozen=True)
class Sent:
    """The response that a server receives."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.headers if field == name]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Return the fields sorted, without the length: a stream has none, its replay has one."""
        return sorted(pair for pair in self.headers if pair[0] != "Content-Length")


def replayed(
    stored: StoredResponse, *, policy: Policy, render: Callable[[Problem, Policy], Response] | None = None
) -> Response:
    """Replay this response. Without `render`, a problem looks as its profile has it."""

    def rendered(problem: Problem, policy: Policy) -> Response:
        return plain(problem, profile=PROFILES[policy.profile], docs_url=DOCS_URL, response_class=Response)

    return replay(stored, policy=policy, response_class=Response, render=render or rendered)


class Remembering:
    """An application with one view, no store, and `replay()` for the response that it captured."""

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
            return replayed(self.result, policy=self.policy)

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


LEASE, MAX_RUNTIME = 30.0, 900.0
"""The seconds of the default policy."""
GONE = LEASE + MAX_RUNTIME
"""Seconds after its claim until a silent worker counts as gone."""

WHY = ("--reason", "asked the bank", "--actor", "ops")
ALICES = ("--key", "k", "--tenant", "acme", "--principal", "alice")
"""The options that name the key of `vanished` and of `paid`."""

NAME = "tests.web.app"


def shop(**settings: Any) -> World:
    """Build a shop with a view `pay`, which fails if the client sends X-Fail."""
    world = new_world(Flask(NAME), init=False, **settings)
    # Before the host's time: a janitor uses the earlier of the two.
    world.clock.now = 1_000_000_000.0
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.get_data(as_text=True))
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    return world


def paid(world: World, key: str = "k", **headers: str) -> Any:
    return world.post(key=key, headers={"X-Tenant": "acme", **{f"X-{n}": value for n, value in headers.items()}})


def run(world: World, *arguments: str, typed: str | bytes | None = None) -> Result:
    return world.app.test_cli_runner().invoke(args=["idempotency", *arguments], input=typed)


def said(result: Result) -> Any:
    """Return the JSON that the command printed."""
    assert not result.stderr, result.stderr
    return json.loads(result.stdout)


def refusal(result: Result) -> str:
    """Return the error of a refused command, which prints nothing to stdout."""
    assert (1, "") == (result.exit_code, result.stdout), result.output
    return result.stderr.removeprefix("Error: ")


def key_of(
    world: World, key: str = "k", *, principal: str | None = "alice", operation: str | None = None
) -> StorageKey:
    scope = Scope(NAME, "acme", principal, operation)
    return identities(world.app.extensions["idempotency"].settings)[0].storage_key(scope, key)


def vanished(
    world: World, key: str = "k", *, on_expiry: OnExpiry = OnExpiry.QUARANTINE, endpoint: str = "pay", **scope: Any
) -> tuple[StorageKey, bytes]:
    """Make a claim whose worker vanishes. Return its storage key and token, with which it could come back."""
    storage_key = key_of(world, key, **scope)
    token = new_token(storage_key.mark)
    about = RequestInfo("acme", "alice", "POST", endpoint)
    asked = ClaimRequest(storage_key, fingerprint=bytes(32), on_expiry=on_expiry, info=about)
    assert isinstance(world.store.claim(asked, token=token, lease=LEASE), Grant)
    return storage_key, token


def lapsed(world: World, key: str = "k", *, after: float = LEASE + 1) -> tuple[StorageKey, bytes]:
    """Make a claim whose worker vanishes, and quarantine it after its lease."""
    owned = vanished(world, key)
    world.clock.advance(after)
    found = world.store.recovery.expired_leases(horizon=world.clock.now, limit=10).found
    assert all(world.store.recovery.quarantine_expired(each, horizon=world.clock.now) for each in found)
    return owned


def record(world: World, key: str = "k") -> Record | None:
    return world.store.read(key_of(world, key))


ANSWER = StoredPayload(b"", 201, success=True, byte_size=4)
"""The payload that a late worker stores; no test opens it."""


def store_named(request: pytest.FixtureRequest, folder: Path) -> str | None:
    """Return the URL of the store that the fixture's parameter names: memory (None), sqlite, or a kind of Redis."""
    if request.param == "memory":
        return None
    if request.param == "sqlite":
        return f"sqlite:///{folder / 'records.db'}"
    url: str = request.getfixturevalue("redis_servers").get(request.param).url
    return url


def world_on(store: Any, *, app: Flask | None = None, **settings: Any) -> World:
    """Build a shop over this store, with tenants from a header; its view fails if the client sends X-Fail."""
    app = app or Flask("tests.web.app")
    world = new_world(
        app, store=store, on_error="quarantine", tenant=lambda: request.headers.get("X-Tenant"), **settings
    )

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    assert 0 == run(world, "db", "upgrade").exit_code
    return world
