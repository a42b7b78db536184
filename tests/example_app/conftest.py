"""The example application on the memory store, with a database of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from example_app.app import create_app
from example_app.models import db


class MakeApp(Protocol):
    def __call__(self, **config: Any) -> Flask: ...


@pytest.fixture
def make_app(tmp_path: Path) -> Iterator[MakeApp]:
    made = []

    def make(**config: Any) -> Flask:
        settings = {
            "TESTING": True,
            "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite3'}",
            "DEMO_SIMULATE": True,
            "DEMO_WITNESS": str(tmp_path / "witness.sqlite3"),
            "IDEMPOTENCY_STORE": "memory://",
        }
        made.append(create_app({**settings, **config}))
        return made[-1]

    yield make
    for app in made:
        with app.app_context():
            db.engine.dispose()


@pytest.fixture
def app(make_app: MakeApp) -> Flask:
    """With simulation on, as in the demo."""
    return make_app()


class Customer:
    """Talks to the service as somebody who has a token."""

    def __init__(self, app: Flask) -> None:
        self.http = app.test_client()

    def pay(self, key: str | None = "key-1", *, bearer: str = "tok_alice", **changes: Any) -> TestResponse:
        body = {"account": "acc_1", "amount": 1050, "currency": "EUR", **changes}
        return self.send("POST", "/payments", key, body, bearer=bearer)

    def send(
        self,
        method: str,
        path: str,
        key: str | None = None,
        json: Any = None,
        *,
        header: str = "Idempotency-Key",
        bearer: str | None = "tok_alice",
        **options: Any,
    ) -> TestResponse:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer is not None else {}
        headers |= {header: key} if key is not None else {}
        return self.http.open(path, method=method, headers=headers, json=json, **options)

    def payments(self, *, bearer: str = "tok_alice") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.send("GET", "/payments", bearer=bearer).get_json()["payments"]
        return found


@pytest.fixture
def customer(app: Flask) -> Customer:
    return Customer(app)
