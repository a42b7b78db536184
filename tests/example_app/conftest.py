"""The example application, with a new database for every test."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from flask import Flask, Response, request
from sqlalchemy import NullPool, text
from werkzeug.serving import make_server
from werkzeug.test import TestResponse

from example_app.app import create_app
from example_app.demo.client import LossyWire
from example_app.models import db


class MakeApp(Protocol):
    def __call__(self, **config: Any) -> Flask: ...


@pytest.fixture(autouse=True)
def no_databases_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "IDEMPOTENCY_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def empty_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables. Copies of it save each test their creation."""
    folder = tmp_path_factory.mktemp("shop")
    made = create_app(config_in(folder))
    with made.app_context(), db.engine.connect() as connection:
        connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    return folder / "shop.sqlite3"


@pytest.fixture
def sqlite_url(tmp_path: Path, empty_shop: Path) -> str:
    """The URL of a new SQLite file with all tables and no row."""
    return f"sqlite:///{shutil.copy(empty_shop, tmp_path / 'shop.sqlite3')}"


@pytest.fixture(params=("sqlite_url", "postgres_url"))
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database. A test that takes this fixture runs on each kind."""
    url: str = request.getfixturevalue(request.param)
    return url


def config_in(folder: Path) -> dict[str, Any]:
    """Return a configuration whose files are in this folder."""
    return {
        "TESTING": True,
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{folder / 'shop.sqlite3'}",
        # No connection stays open between requests, so none at the end.
        "SQLALCHEMY_ENGINE_OPTIONS": {"poolclass": NullPool},
        "DEMO_SIMULATE": True,
        "DEMO_WITNESS": str(folder / "witness.sqlite3"),
        "DEMO_PROVIDERS": str(folder / "providers.sqlite3"),
        "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60",
    }


@pytest.fixture
def make_app(tmp_path: Path, sqlite_url: str) -> MakeApp:
    def make(**config: Any) -> Flask:
        return create_app({**config_in(tmp_path), **config})

    return make


@pytest.fixture
def app(make_app: MakeApp) -> Flask:
    """With simulation on, as in the demo."""
    return make_app()


class Customer:
    """A client of the service with a token."""

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


def on_records(app: Flask, statement: str) -> None:
    """Change records as only time or an accident does: `UPDATE idempotency_records SET lease_expires_at = 0`."""
    with app.app_context(), db.engine.begin() as connection:
        connection.execute(text(statement))


@pytest.fixture
def customer(app: Flask) -> Customer:
    return Customer(app)


class Server:
    """The application in a thread, with a note of every request that came in."""

    def __init__(self, app: Flask) -> None:
        self.keys: list[str | None] = []
        self.refusals: list[int] = []
        app.before_request_funcs.setdefault(None, []).insert(0, self._note)
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _note(self) -> Response | None:
        self.keys.append(request.headers.get("Idempotency-Key"))
        return Response(status=self.refusals.pop()) if self.refusals else None

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(app: Flask) -> Iterator[Server]:
    server = Server(app)
    yield server
    server.stop()


@pytest.fixture
def wire(server: Server) -> Iterator[LossyWire]:
    with LossyWire(server.port) as wire:
        yield wire
