"""What follows a payment: its message, its ledger entry, and the call of its company's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from celery.exceptions import Retry
from flask import Flask
from sqlalchemy import select

from example_app import events
from example_app.demo.client import Merchant
from example_app.models import LedgerEntry, db
from flask_idempotency.stores.sql.schema import outbox as messages
from tests.example_app.conftest import Customer, MakeApp


@pytest.fixture
def merchant() -> Iterator[Merchant]:
    merchant = Merchant()
    yield merchant
    merchant.stop()


@pytest.fixture
def app(make_app: MakeApp, merchant: Merchant) -> Iterator[Flask]:
    made = make_app(EVENTS_BROKER_URL="memory://", MERCHANT_URL=merchant.url)
    with made.app_context():
        yield made


@pytest.fixture
def customer(app: Flask) -> Customer:
    return Customer(app)


def published() -> list[tuple[str, str]]:
    """Return topic and id of each message in the outbox, in order."""
    found = db.session.execute(select(messages.c.topic, messages.c.message_id).order_by(messages.c.seq)).all()
    db.session.rollback()
    return [(row.topic, row.message_id) for row in found]


def entries() -> list[str]:
    return list(db.session.scalars(select(LedgerEntry.payment)))


def booking(payment: Any) -> dict[str, Any]:
    return {"payment": payment["id"], "tenant": "acme", "amount": payment["amount"], "currency": payment["currency"]}


def test_a_payment_publishes_one_message(customer: Customer) -> None:
    """Its retry publishes none."""
    for _ in range(2):
        assert 201 == customer.pay("key-1").status_code

    assert [events.BOOK] == [topic for topic, _ in published()]


def test_a_refused_payment_publishes_nothing(customer: Customer) -> None:
    assert 400 <= customer.pay("key-1", amount=-1).status_code < 500

    assert [] == published()


def test_without_a_broker_nothing_is_published(make_app: MakeApp) -> None:
    app = make_app()
    with app.app_context():
        assert 201 == Customer(app).pay("key-1").status_code

        assert [] == published()


def test_a_message_that_comes_twice_is_booked_once(customer: Customer) -> None:
    """And the message for the company is published once."""
    payment = customer.pay("key-1").get_json()
    [(_, message_id)] = published()

    for _ in range(2):
        events.book.apply(kwargs=booking(payment), task_id=message_id, throw=True)

    assert [payment["id"]] == entries()
    assert [events.BOOK, events.NOTIFY] == [topic for topic, _ in published()]


def test_a_booking_that_fails_leaves_neither_entry_nor_message(
    customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry and the message are one transaction."""
    payment = customer.pay("key-1").get_json()
    publish = events.outbox.publish

    def fail(*args: Any, **options: Any) -> str:
        publish(*args, **options)
        raise RuntimeError("after the last line")

    monkeypatch.setattr(events.outbox, "publish", fail)
    with pytest.raises(RuntimeError, match="after the last line"):
        events.book.apply(kwargs=booking(payment), task_id="m-1", throw=True)

    assert [] == entries()
    assert [events.BOOK] == [topic for topic, _ in published()]


def test_the_company_is_called_once(app: Flask, merchant: Merchant) -> None:
    """Two deliveries make one call, and another message has another key."""
    for message_id in ("m-1", "m-1", "m-2"):
        events.notify.apply(kwargs={"payment": "pay_1", "tenant": "acme"}, task_id=message_id, throw=True)

    keys = [key for payment, key in merchant.calls if payment == "pay_1"]
    assert 2 == len(keys) == len(set(keys))


def test_a_company_that_does_not_answer_is_called_again_under_the_same_key(
    app: Flask, merchant: Merchant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply was lost: the server has had the call."""
    post, sent = httpx.post, list[str]()

    def lose_first_reply(*args: Any, **options: Any) -> httpx.Response:
        response = post(*args, **options)
        sent.append(options["headers"]["Idempotency-Key"])
        if len(sent) == 1:
            raise httpx.ReadTimeout("lost")
        return response

    monkeypatch.setattr(httpx, "post", lose_first_reply)
    message = {"payment": "pay_1", "tenant": "acme"}
    with pytest.raises(Retry):
        events.notify.apply(kwargs=message, task_id="m-1", throw=True)
    events.notify.apply(kwargs=message, task_id="m-1", throw=True)

    assert [("pay_1", sent[0]), ("pay_1", sent[0])] == merchant.calls
