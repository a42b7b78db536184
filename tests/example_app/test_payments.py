from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from example_app.models import db
from example_app.schemas import LARGEST_AMOUNT
from flask_idempotency.engine.events import Event
from flask_idempotency.signals import committed_early
from tests.example_app.conftest import Customer, MakeApp


def test_create(customer: Customer) -> None:
    """A payment is created, and Location leads to it."""
    answer = customer.pay(account="acc_7", amount=4200, currency="eur")

    assert 201 == answer.status_code
    found = customer.send("GET", answer.headers["Location"]).get_json()
    assert answer.get_json() == found
    assert ("acc_7", 4200, "EUR") == (found["account"], found["amount"], found["currency"])


def test_retry(customer: Customer) -> None:
    """The same request again gets the same response, and there is one payment."""
    first = customer.pay("key-1")

    again = customer.pay("key-1")

    assert (201, first.data, first.headers["Location"]) == (again.status_code, again.data, again.headers["Location"])
    assert "true" == again.headers["Idempotency-Replayed"]
    assert [first.get_json()] == customer.payments()


def test_no_usable_key(customer: Customer) -> None:
    """Payments require a well-formed key; without one nothing is paid."""
    answers = [customer.pay(key) for key in (None, "", "a b")]

    assert [400] * 3 == [answer.status_code for answer in answers]
    assert ["missing-key", "invalid-key", "invalid-key"] == [answer.get_json()["code"] for answer in answers]
    assert [] == customer.payments()


def test_changed_payload(customer: Customer) -> None:
    """A key that is used for something else is refused, and the first payment stays as it is."""
    first = customer.pay("key-1")

    answer = customer.pay("key-1", amount=1)

    assert (422, "key-reused") == (answer.status_code, answer.get_json()["code"])
    assert [first.get_json()] == customer.payments()


INVALID: tuple[tuple[str, Any], ...] = (
    *(("amount", amount) for amount in (0, -5, 10.5, "much", LARGEST_AMOUNT + 1, None)),
    *(("currency", currency) for currency in ("EURO", 7)),
    *(("account", account) for account in ("", "x" * 65)),
    ("amuont", 5),
)


def test_invalid_input(customer: Customer) -> None:
    """A problem names the invalid fields, and there is no payment."""
    for number, (field, value) in enumerate(INVALID):
        answer = customer.pay(f"key-{number}", **{field: value})

        assert (400, "application/problem+json") == (answer.status_code, answer.mimetype), (field, value)
        assert ("invalid-input", [field]) == (answer.get_json()["code"], list(answer.get_json()["errors"])), value
    assert [] == customer.payments()


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


@pytest.mark.parametrize(("moment", "statuses"), (("before_commit", [500, 201]), ("after_commit", [201, 201])))
def test_failing_around_the_commit(
    make_app: MakeApp, database: str, monkeypatch: pytest.MonkeyPatch, moment: str, statuses: list[int]
) -> None:
    """An error before the commit leaves no payment, and the retry pays. An error after the commit changes nothing."""

    def fail() -> None:
        raise RuntimeError("as if the worker broke here")

    monkeypatch.setattr("example_app.simulate.crash", fail)
    customer = Customer(make_app(SQLALCHEMY_DATABASE_URI=database))

    answers = [customer.pay("key-1", simulate={"crash": moment}) for _ in range(2)]

    assert statuses == [answer.status_code for answer in answers]
    assert 1 == len(customer.payments())


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
