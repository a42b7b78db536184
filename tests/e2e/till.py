"""A third victim, in the test's own process: its store may be any, and what its views did is in plain lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import uuid4

from flask import Flask, abort, request
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.engine.events import ClaimGranted, Event
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, UnknownOutcome
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.web.janitor import janitor_of
from tests.apps import record_events
from tests.e2e.ledger import PATIENCE_SECONDS

LEASE: Final = 900.0
"""No test lasts until its first renewal: what a clock's step ends stays ended."""

VIEWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "marked": {"effects": "marked"},
    "deduplicated": {"effects": "deduplicated"},
}


@dataclass
class Answer:
    """What a client was told."""

    status: int
    code: str | None
    replayed: bool
    body: bytes

    @property
    def told(self) -> tuple[int, str | None]:
        return self.status, self.code


@dataclass
class Till:
    """An application that takes payments, and the outside world that they are made in."""

    store: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    executions: list[str] = field(default_factory=list)
    """The key's downstream name, each time a view was entered."""
    effects: list[str] = field(default_factory=list)
    """The same, each time money was moved."""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = app = Flask("till")
        app.config.update(TESTING=True, PROPAGATE_EXCEPTIONS=False)
        app.config.update(IDEMPOTENCY_STORE=self.store, IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60")
        app.config.update(IDEMPOTENCY_LEASE=LEASE, IDEMPOTENCY_MAX_RUNTIME=LEASE, **self.config)
        self.idempotency = Idempotency(app, principal=lambda: "alice")
        self._paused = threading.Semaphore(0)
        self._go = threading.Event()
        for path, policy in VIEWS.items():
            # Annotations belong to one function object, so every path has its own.
            app.add_url_rule(f"/{path}", path, idempotent(**policy)(partial(self._pay)), methods=["POST"])
        record_events(app, self.events)

    def _pay(self) -> tuple[dict[str, str], int]:
        name = current_claim.downstream_key("pay")
        self.executions.append(name)
        self.pause_if_told()
        if request.path == "/marked":
            current_claim.point_of_no_return()
        self.pause_if_told("point")
        if request.headers.get("X-Fail"):
            abort(503)
        self.effects.append(name)
        self.pause_if_told("effect")
        return {"run": uuid4().hex}, 201

    def pause_if_told(self, point: str = "start") -> None:
        """Where a request stops that `begin` has sent."""
        if request.headers.get("X-Pause") == point:
            self._paused.release()
            assert self._go.wait(PATIENCE_SECONDS)

    def ask(self, path: str, key: str, **headers: str) -> Answer:
        """One request, answered in this thread. `X_Pause="start"` stops it there until `OwnerView.finish`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.app.test_client(use_cookies=False).post(
            path, json={"amount": 100}, headers={"Idempotency-Key": key, **named}
        )
        return _answer(response)

    def begin(self, path: str, key: str, *, at: str = "start") -> Owner:
        """A request that is stopped at this point of its view."""
        self._go.clear()
        owner = Owner(lambda: self.ask(path, key, X_Pause=at), self._go)
        assert self._paused.acquire(timeout=PATIENCE_SECONDS)
        return owner

    def resolve(self, endpoint: str) -> None:
        """Have a resolver look at what has happened out there. It looks, and does not rule out what may still come."""

        @self.idempotency.resolver(endpoint)
        def look(unknown: UnknownOutcome) -> Resolution:
            happened = unknown.downstream_key("pay") in self.effects
            return Happened(({"run": "resolved"}, 201)) if happened else NeverHappened()

    def sweep(self, *, host_clock: Callable[[], float] | None = None) -> dict[str, Any]:
        """One round of the janitor: every task there is, and its report."""
        janitor = janitor_of(self.app) if host_clock is None else janitor_of(self.app, host_clock=host_clock)
        return {task: janitor.run(task, Batcher()) for task in janitor.tasks}

    @property
    def fences(self) -> list[int]:
        """Of all claims, in the order in which they were granted."""
        return [event.fence for event in self.events if isinstance(event, ClaimGranted)]


class Owner:
    """A request that is being handled, in a thread of its own."""

    def __init__(self, work: Callable[[], Answer], go: threading.Event) -> None:
        self._go = go
        self._given: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._given.append(work()))
        self._thread.start()

    def finish(self) -> Answer:
        """Let its view go on. What its client is told."""
        self._go.set()
        self._thread.join(PATIENCE_SECONDS)
        return self._given[0]


def _answer(response: TestResponse) -> Answer:
    problem = response.mimetype == "application/problem+json"
    return Answer(
        response.status_code,
        response.get_json()["code"] if problem else None,
        response.headers.get("Idempotency-Replayed") == "true",
        response.data,
    )
