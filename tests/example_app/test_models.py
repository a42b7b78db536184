"""The database of the service: its URL, its tables, and a cache in front of it."""

from __future__ import annotations

import ast
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import inspect

from example_app import models
from example_app.app import create_app
from example_app.models import db
from flask_idempotency import ConfigurationError
from tests.example_app.conftest import Customer, MakeApp

CLOSED_PORT = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("given", "expected"),
    (
        ("postgres://u:p@host:5/name?a=b", "postgresql+psycopg://u:p@host:5/name?a=b"),
        ("postgresql://host/name", "postgresql+psycopg://host/name"),
        ("postgresql+psycopg2://host/name", "postgresql+psycopg2://host/name"),
        ("sqlite:///postgres://", "sqlite:///postgres://"),
    ),
)
def test_spelling(given: str, expected: str) -> None:
    """The usual names of PostgreSQL mean the installed driver. A URL that names a driver keeps it."""
    assert expected == models.database_url(given)


def test_database_url(make_app: MakeApp, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DATABASE_URL is where payments and records are, and PATCH and the other views work there too."""
    monkeypatch.setenv("DATABASE_URL", postgres_url.replace("postgresql+psycopg:", "postgres:"))
    config = make_app().config
    names = ("SQLALCHEMY_ENGINE_OPTIONS", "IDEMPOTENCY_SECRET", "DEMO_WITNESS")
    app = create_app({name: config[name] for name in names})
    customer = Customer(app)

    paid = [customer.pay("key-1") for _ in range(2)]
    changed = customer.send("PATCH", paid[0].headers["Location"], "key-2", {"amount": 1})

    with app.app_context():
        assert "postgresql" == db.engine.dialect.name
        assert inspect(db.engine).has_table("idempotency_records")
    assert [201, 201, 200] == [answer.status_code for answer in (*paid, changed)]
    assert 1 == len(customer.payments())


@pytest.mark.parametrize("name", ("IDEMPOTENCY_REDIS_URL", "FLASK_IDEMPOTENCY_REDIS_URL"))
def test_a_cache_that_is_gone(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """IDEMPOTENCY_REDIS_URL puts a cache in front, and the service works without it."""
    monkeypatch.setenv(name, CLOSED_PORT)
    app = make_app()
    customer = Customer(app)

    assert CLOSED_PORT == app.config["IDEMPOTENCY_REDIS_URL"]
    assert [201, 201] == [customer.pay("key-1").status_code for _ in range(2)]
    assert 1 == len(customer.payments())


def test_records_elsewhere(make_app: MakeApp) -> None:
    """A payment cannot commit together with a record in Redis or memory. The error names the remedy."""
    with pytest.raises(ConfigurationError, match=r"configure\('payments'\).*flask-sqlalchemy://"):
        make_app(IDEMPOTENCY_STORE="memory://")


@pytest.mark.slow
def test_workers_start_at_once(make_app: MakeApp, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker creates the missing tables, and none fails because of another."""
    barrier, lock, parse = Barrier(4), Lock(), ast.parse

    def parse_alone(source: str) -> Any:
        with lock:
            return parse(source)

    # Werkzeug parses templates of its rules. CPython 3.11 may fail when two threads do that at once: gh-106905.
    monkeypatch.setattr(ast, "parse", parse_alone)

    def start(_: int) -> Customer:
        barrier.wait(60)
        return Customer(make_app(SQLALCHEMY_DATABASE_URI=database))

    with ThreadPoolExecutor(4) as threads:
        customers = list(threads.map(start, range(4)))

    assert [201] * 4 == [customer.pay("key-1").status_code for customer in customers]
    assert 1 == len(customers[0].payments())


def test_write_ahead_mode_is_set_again_while_another_worker_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite refuses it without waiting, and a worker that does not start ends gunicorn."""
    executed: list[str] = []
    refusals = ["database is locked"] * 3
    monkeypatch.setattr(models, "time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: 0.0))

    def execute(statement: str) -> None:
        executed.append(statement)
        if "WAL" in statement and refusals:
            raise sqlite3.OperationalError(refusals.pop())

    connection: Any = SimpleNamespace(execute=execute)
    models.use_write_ahead_log(connection)

    assert ["PRAGMA busy_timeout = 30000", *["PRAGMA journal_mode = WAL"] * 4] == executed


def test_write_ahead_mode_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, models.BUSY_SECONDS + 1))
    monkeypatch.setattr(models, "time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(clock)))

    def execute(statement: str) -> None:
        if "WAL" in statement:
            raise sqlite3.OperationalError("database is locked")

    connection: Any = SimpleNamespace(execute=execute)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        models.use_write_ahead_log(connection)
