"""An application with a console, and the browser of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import unescape
from inspect import iscoroutinefunction
from typing import Any, Literal

from flask import Flask, abort, request
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from flask_idempotency.console import Console, Operator
from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.operations.records import RecordView, handle_of, key_of
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.apps import record_events

SECRET = "s-9f2c47d1e8b35a60c1d47be2a5583f09"
KEY = "Idempotency-Key"
ANN = "ann"
"""An operator of everything."""
LIMITED = "bob@acme"
"""An operator of one tenant."""
VIEWER = "viewer"
"""An operator who may look, and change nothing."""

HIDDEN = re.compile(r'<input type="hidden" name="([^"]*)" value="([^"]*)">')
HANDLE = re.compile(r"/records/([a-z2-7]{77})")


def authorize(action: str, record: RecordView | None) -> Operator | str | Literal[False] | None:
    """Take the operator's name from a header, as a proxy would set it."""
    name = request.headers.get("X-Operator", "")
    if not name:
        return None
    if name == "stranger":
        abort(401)
    if name.startswith(VIEWER) and action != "view":
        return False
    tenant = name.partition("@")[2]
    return Operator(name, {tenant}) if tenant else name


@dataclass
class Rig:
    """A shop with a console, its store and the events that it sent."""

    app: Flask
    idempotency: Idempotency
    store: Any
    clock: FrozenClock
    runs: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """What `authorize` was asked: the action, and the handle of the record."""

    def browser(self, operator: str = ANN, **options: Any) -> Browser:
        return Browser(self.app.test_client(**options), operator)

    def pay(
        self, key: str = "k", *, tenant: str | None = "acme", fail: bool = False, path: str = "/pay"
    ) -> TestResponse:
        headers = {KEY: key, **({"X-Fail": "yes"} if fail else {}), **({} if tenant is None else {"X-Tenant": tenant})}
        return self.app.test_client(use_cookies=False).post(path, headers=headers)

    def quarantined(self, key: str = "k", *, tenant: str = "acme") -> str:
        """Make a request whose outcome is unknown, and return the handle of its record."""
        before = self.handles()
        assert 500 == self.pay(key, tenant=tenant, fail=True).status_code
        (handle,) = self.handles() - before
        return handle

    def handles(self) -> set[str]:
        return {handle_of(found.key) for found in self.store.recovery.scan(State.QUARANTINED, limit=1000).found}

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    def note(self, handle: str, actor: str = ANN, *, reason: str = "asked the bank", verb: str = "completed") -> None:
        """Add an entry to the audit trail."""
        entry = AuditEntry(verb, "quarantined", actor, reason)
        self.store.audit.append(key_of(handle), entry, token=len(self.events).to_bytes(8, "big") + bytes(8))


@dataclass
class Browser:
    """The browser of one operator, with its cookies."""

    client: FlaskClient
    operator: str
    prefix: str = "/idempotency"

    def get(self, path: str, **headers: str) -> TestResponse:
        return self.client.get(self.prefix + path, headers=self._headers(headers))

    def post(self, path: str, fields: Mapping[str, Any] | None = None, **headers: str) -> TestResponse:
        return self.client.post(self.prefix + path, data=dict(fields or {}), headers=self._headers(headers))

    def form(self, path: str) -> dict[str, str]:
        """Return the hidden fields of the form on this page."""
        page = self.get(path)
        assert 200 == page.status_code, page.text
        return hidden(page)

    def preview(self, path: str, **said: str) -> TestResponse:
        """Fill in the form on this page, and send it."""
        return self.post(path, {**self.form(path), "reason": "asked the bank", **said})

    def change(self, path: str, **said: str) -> TestResponse:
        """Fill in the form on this page, send it, and confirm what the next page shows."""
        shown = self.preview(path, **said)
        assert 200 == shown.status_code, shown.text
        return self.post(
            path, {**hidden(shown), "confirm": "yes", **({"force": "yes"} if 'name="force"' in shown.text else {})}
        )

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        named = {"X-Operator": self.operator} if self.operator else {}
        return {**named, **{name.replace("_", "-"): value for name, value in headers.items()}}


def hidden(page: TestResponse) -> dict[str, str]:
    return {unescape(name): unescape(value) for name, value in HIDDEN.findall(page.text)}


def rig(
    store: Any = None,
    *,
    app: Flask | None = None,
    testing: bool = True,
    ask: Callable[..., Any] = authorize,
    tenant: Callable[[], str | None] = lambda: request.headers.get("X-Tenant"),
    console: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Rig:
    """Build a shop with a view `pay` that fails if the client sends X-Fail, and mount a console."""
    app = app or Flask("tests.console.app")
    app.config.update(TESTING=testing, PROPAGATE_EXCEPTIONS=False, SECRET_KEY="of-flask")
    clock = FrozenClock()
    # Before the host's time: an operator sees the earlier of the two.
    clock.now = 1_000_000_000.0
    store = MemoryStore(clock=clock) if store is None else store
    settings.setdefault("allow_anonymous", True)
    idempotency = Idempotency(store=store, secret=SECRET, on_error="quarantine", **settings)
    idempotency.tenant_loader(tenant)
    made = Rig(app, idempotency, store, clock)

    def remembered(action: Any, record: RecordView | None) -> Any:
        made.asked.append((action, None if record is None else record.handle))
        return ask(action, record)

    asked = ask if iscoroutinefunction(ask) else remembered
    app.register_blueprint(Console(idempotency, authorize=asked, **(console or {})))
    idempotency.init_app(app)

    record_events(app, made.events)

    @app.post("/pay")
    def pay() -> tuple[str, int]:
        made.runs.append(request.headers[KEY])
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    return made
