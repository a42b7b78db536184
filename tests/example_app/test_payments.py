from __future__ import annotations

from typing import Any

from flask import Flask

from example_app.models import db
from flask_idempotency.engine.events import Event
from flask_idempotency.signals import committed_early
from tests.example_app.conftest import Customer


def test_create(customer: Customer) -> None:
    """A payment is created, and Location leads to it."""
    answer = customer.pay(account="acc_7", amount=4200, currency="eur")

    assert 201 == answer.status_code
    found = customer.send("GET", answer.headers["Location"]).get_json()
    assert answer.get_json() == found
    assert ("acc_7", 4200, "EUR") == (found["account"], found["amount"], found["currency"])


def test_body_that_is_no_json(customer: Customer) -> None:
    """Broken JSON and other media types get their own statuses."""
    for content_type, status in (("application/json", 400), ("text/plain", 415)):
        answer = customer.send("POST", "/payments", f"key-{status}", data=b"{", content_type=content_type)

        assert (status, "application/problem+json") == (answer.status_code, answer.mimetype)


def test_change(customer: Customer) -> None:
    """PATCH changes what it names, once; the same PATCH again is a replay."""
    path = customer.pay("key-1").headers["Location"]

    first = customer.send("PATCH", path, "key-2", {"amount": 2000})
    again = customer.send("PATCH", path, "key-2", {"amount": 2000})

    assert (200, 2000, "EUR") == (first.status_code, first.get_json()["amount"], first.get_json()["currency"])
    assert (200, first.data, "true") == (again.status_code, again.data, again.headers["Idempotency-Replayed"])
    assert 2000 == customer.send("GET", path).get_json()["amount"]


def test_change_that_changes_nothing_allowed(customer: Customer) -> None:
    """An empty or wrong change is refused and leaves the payment alone."""
    created = customer.pay("key-1")

    bodies: tuple[dict[str, Any], ...] = ({}, {"amount": 0}, {"id": "pay_1"})
    for number, body in enumerate(bodies):
        assert 400 == customer.send("PATCH", created.headers["Location"], f"change-{number}", body).status_code, body
    assert [created.get_json()] == customer.payments()


def test_other_errors_are_problems(customer: Customer) -> None:
    """Errors of routing have the same form as all others, and keep the headers of their error."""
    for method, path, status in (
        ("GET", "/payments/pay_none", 404),
        ("GET", "/nowhere", 404),
        ("PUT", "/payments", 405),
    ):
        answer = customer.send(method, path)

        assert (status, "application/problem+json") == (answer.status_code, answer.mimetype)
        assert status == answer.get_json()["status"]
    assert {"GET", "HEAD", "OPTIONS", "POST"} == set(answer.headers["Allow"].split(", "))


def test_no_view_commits(app: Flask) -> None:
    """The library commits, and reports no early commit."""
    told: list[Event] = []

    def listen(sender: Flask, event: Event) -> None:
        told.append(event)

    committed_early.connect(listen, app)
    customer = Customer(app)
    path = customer.pay("key-1").headers["Location"]

    assert 200 == customer.send("PATCH", path, "key-2", {"amount": 1}).status_code
    assert [] == told


def test_journal(app: Flask) -> None:
    """Readers do not stop the writer: the database is in write-ahead mode."""
    with app.app_context():
        assert "wal" == db.session.execute(db.text("PRAGMA journal_mode")).scalar()
