"""An application in the compliance mode, on every store that can be looked into."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from flask import Flask, Response, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.store import Store
from tests.apps import record_events
from tests.compliance.vaults import VAULTS, Vault

SECRET = "kept outside the store: 9f2c47d1e8b35a60c1d47be2"
RING = "2026-11:" + base64.b64encode(bytes(range(32))).decode()


@dataclass
class Bank:
    """Pays once for each key, and writes down how often it did. Principal and tenant are as the headers say."""

    app: Flask
    vault: Vault
    idempotency: Idempotency
    runs: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    during: Callable[[], object] | None = None
    """What happens while a payment is made."""

    @property
    def store(self) -> Store:
        store: Store = self.app.extensions["idempotency"].engine._deps.store
        return store

    def pay(self, key: str = "k", **headers: str) -> TestResponse:
        body = {"amount": 5, "to": headers.pop("to", "somebody")}
        sent = {"Idempotency-Key": key, "X-User": "alice", "X-Tenant": "acme", **headers}
        return self.app.test_client(use_cookies=False).post("/payments", json=body, headers=sent, buffered=True)

    def key_of(self, key: str = "k", *, tenant: str = "acme", principal: str = "alice") -> StorageKey:
        scope = Scope(self.app.name, tenant, principal)
        return Identity(SECRET.encode()).storage_key(scope, key)

    def told(self, kind: type[Event]) -> int:
        return sum(type(event) is kind for event in self.events)


def new_bank(vault: Vault, **config: Any) -> Bank:
    """Closed with its vault."""
    app = Flask("tests.compliance")
    app.config |= {
        **vault.config,
        "PROPAGATE_EXCEPTIONS": False,
        "IDEMPOTENCY_SECRET": SECRET,
        "IDEMPOTENCY_ENCRYPTION": "required",
        "IDEMPOTENCY_KEY_RING": RING,
        **config,
    }
    idempotency = Idempotency(
        principal=lambda: request.headers["X-User"], tenant=lambda: request.headers.get("X-Tenant")
    )
    bank = Bank(app, vault, idempotency)
    if vault.url is not None:
        app.config |= {"SQLALCHEMY_DATABASE_URI": vault.url, "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": True}
        SQLAlchemy(app)

    @app.post("/payments")
    def pay() -> Response:
        bank.runs.append(request.headers["Idempotency-Key"])
        if bank.during is not None:
            bank.during()
        if request.headers.get("X-Fails"):
            raise RuntimeError("the bank is closed")
        paid = f'{{"paid": "{request.get_json()["to"]}"}}'
        return Response(
            paid, 201, content_type="application/json", headers={"Location": request.headers.get("X-At", "/1")}
        )

    record_events(app, bank.events)
    idempotency.init_app(app)
    vault.ends.callback(_close, bank)
    return bank


def _close(bank: Bank) -> None:
    store: Any = bank.store
    parts: list[Any] = [store, getattr(store, "_system", None), getattr(store, "_cache", None)]
    for each in parts:
        if hasattr(each, "close"):
            each.close()


@pytest.fixture(params=VAULTS)
def vault(request: pytest.FixtureRequest) -> Iterator[Vault]:
    with ExitStack() as ends:
        vault = VAULTS[request.param](request, ends)
        vault.ends = ends
        yield vault


@pytest.fixture
def bank(vault: Vault) -> Bank:
    return new_bank(vault)
