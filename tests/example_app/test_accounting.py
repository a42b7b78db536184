"""Invoices: the dialect with X-Idempotency-Key, and markers that make a second run harmless."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from example_app.models import Invoice, db
from tests.example_app.conftest import Customer, on_records

INVOICE = {"customer": "cus_1", "amount": 4200, "currency": "EUR"}


def invoice(customer: Customer, key: str | None = "key-1", **changes: Any) -> TestResponse:
    return customer.send("POST", "/api/invoices", key, {**INVOICE, **changes}, header="X-Idempotency-Key")


def test_x_idempotency(customer: Customer) -> None:
    """Invoices know X-Idempotency-Key and mark replays with X-Idempotency-Replay."""
    first, again = invoice(customer), invoice(customer)

    assert (201, first.data, "true") == (again.status_code, again.data, again.headers["X-Idempotency-Replay"])
    assert 422 == invoice(customer, amount=1).status_code


def test_x_idempotency_key_is_optional(customer: Customer) -> None:
    """Without a key two requests are two invoices."""
    first, second = invoice(customer, None), invoice(customer, None)

    assert (201, 201) == (first.status_code, second.status_code)
    assert first.get_json()["id"] != second.get_json()["id"]


def test_invoice_replaced(customer: Customer) -> None:
    """PUT replaces the whole invoice, once per key, and none of another company."""
    path = f"/api/invoices/{invoice(customer).get_json()['id']}"

    first = customer.send("PUT", path, "key-2", {**INVOICE, "amount": 1}, header="X-Idempotency-Key")
    again = customer.send("PUT", path, "key-2", {**INVOICE, "amount": 1}, header="X-Idempotency-Key")

    assert (200, 1) == (first.status_code, first.get_json()["amount"])
    assert (first.data, "1") == (again.data, again.headers["X-Executions"])
    assert 404 == customer.send("PUT", path, json=INVOICE, bearer="tok_carol").status_code


def test_a_second_run_writes_no_invoice_over_a_later_one(app: Flask, customer: Customer) -> None:
    """The store has lost the record, and another request has replaced the invoice. The marker is still there."""
    path = f"/api/invoices/{invoice(customer).get_json()['id']}"

    def put(key: str, amount: int) -> TestResponse:
        return customer.send("PUT", path, key, {**INVOICE, "amount": amount}, header="X-Idempotency-Key")

    first = put("key-2", 1)
    put("key-3", 2)
    on_records(app, "DELETE FROM idempotency_records")
    again, made = put("key-2", 1), invoice(customer)

    assert (first.data, "2") == (again.data, again.headers["X-Executions"])
    assert (path.rpartition("/")[2], "2") == (made.get_json()["id"], made.headers["X-Executions"])
    with app.app_context():
        assert [2] == list(db.session.scalars(db.select(Invoice.amount)))


@pytest.mark.parametrize("method", ("POST", "PUT"))
def test_a_key_that_ended_and_comes_with_other_contents_is_told_that_nothing_was_written(
    app: Flask, customer: Customer, method: str
) -> None:
    """Records expire after a day and markers stay. A 201 with the new amount would name an invoice that does not exist."""
    path = f"/api/invoices/{invoice(customer).get_json()['id']}" if method == "PUT" else "/api/invoices"
    sent = [(key, {**INVOICE, "amount": amount}) for key, amount in (("key-2", 1), ("key-2", 2))]

    answers = []
    for key, body in sent:
        answers.append(customer.send(method, path, key, body, header="X-Idempotency-Key"))
        on_records(app, "DELETE FROM idempotency_records")

    assert answers[0].status_code in (200, 201)
    assert 422 == answers[1].status_code
    assert "new key" in answers[1].get_json()["detail"]
    with app.app_context():
        assert [1] == list(db.session.scalars(db.select(Invoice.amount)))
