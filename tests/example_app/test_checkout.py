"""The checkout: four effects, each once, whatever happens to its worker. Effects are counted at the other companies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import func, select
from werkzeug.test import TestResponse

from example_app.models import Order, db
from example_app.providers import DECLINED, PROVIDERS, CardDeclined, Providers
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.testing import every_crash
from flask_idempotency.web.janitor import janitor_of
from tests.example_app.conftest import Customer, MakeApp, on_records

ORDER = {"item": "tea", "card": "tok_visa"}


def check_out(customer: Customer, key: str = "key-1", **changes: Any) -> Any:
    return customer.send("POST", "/checkouts", key, {**ORDER, **changes})


def effects(app: Flask) -> tuple[int, int, int, int]:
    """Return how many reservations, charges and mails there are, and how many orders."""
    with app.app_context():
        orders = db.session.scalars(select(func.count()).select_from(Order)).one()
    reservations, charges, mails = app.extensions[PROVIDERS].counts()
    return reservations, charges, mails, orders


def end_leases(app: Flask) -> None:
    on_records(app, "UPDATE idempotency_records SET lease_expires_at = requested_at + 1 WHERE state <> 'completed'")


def test_a_checkout_has_four_effects(app: Flask, customer: Customer) -> None:
    first, again = check_out(customer), check_out(customer)

    assert (201, first.data) == (again.status_code, again.data)
    assert "true" == again.headers["Idempotency-Replayed"]
    assert "1" == again.headers["X-Executions"]
    assert (1, 1, 1, 1) == effects(app)


def test_a_declined_card_costs_nothing(app: Flask, customer: Customer) -> None:
    """The reservation is done, and the charge is not: the 402 is the response of this key."""
    declined = check_out(customer, card=DECLINED)

    assert (402, "card-declined") == (declined.status_code, declined.get_json()["code"])
    assert (1, 0, 0, 0) == effects(app)
    assert declined.data == check_out(customer, card=DECLINED).data
    assert 201 == check_out(customer, "key-2").status_code


def test_the_card_provider_takes_money_each_time(tmp_path: Path) -> None:
    """Otherwise the counts of these tests would prove nothing."""
    shops = Providers(tmp_path / "providers.sqlite3")
    charges = {shops.charge("tok_visa", 450, key="k") for _ in range(2)}
    reservations = {shops.reserve("tea", key="k") for _ in range(2)}
    for _ in range(2):
        shops.send_mail("alice", "Thank you.", key="k")
    with pytest.raises(CardDeclined):
        shops.charge(DECLINED, 450, key="k")

    assert (1, 2, 1) == shops.counts()
    assert (2, 1) == (len(charges), len(reservations))
    assert shops.find_charge(key="k") in charges
    assert shops.find_charge(key="other") is None
    assert 2 == shops.lookups()


@pytest.fixture
def shop(make_app: MakeApp, database: str) -> Flask:
    return make_app(SQLALCHEMY_DATABASE_URI=database)


@pytest.mark.parametrize("company", ("reserve", "send_mail"))
def test_the_resolver_waits_where_no_charge_is_in_doubt(
    app: Flask, customer: Customer, monkeypatch: pytest.MonkeyPatch, company: str
) -> None:
    """The janitor calls it for every quarantine of its endpoint: before the charge, or when the charge has finished."""

    def away(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(Providers, company, away)
    with pytest.raises(ConnectionError):
        check_out(customer)
    on_records(app, "UPDATE idempotency_records SET state = 'quarantined', reason = 'never-resumed'")
    end_leases(app)

    report = janitor_of(app).run("reap", Batcher())

    assert isinstance(report, ReapReport)
    assert (1, 1, 0) == (report.asked, report.unknown, report.failed)


@pytest.mark.slow
def test_each_crash_ends_in_an_order_or_in_a_doubt_that_is_settled(shop: Flask) -> None:
    """The resolver settles a charge that was made. One that was not can only be ruled out by a person."""
    ruled_out: list[str] = []

    def send(client: FlaskClient, key: str) -> TestResponse:
        headers = {"Authorization": "Bearer tok_alice", "Idempotency-Key": key}
        return client.post("/checkouts", json=ORDER, headers=headers)

    def counts() -> dict[str, int]:
        return dict(zip(("reservations", "charges", "mails", "orders"), effects(shop), strict=True))

    def settle() -> None:
        janitor_of(shop).run("reap", Batcher())
        cli = shop.test_cli_runner()
        left = json.loads(cli.invoke(args=["idempotency", "list", "--state", "quarantined", "--json"]).stdout)
        for record in left["records"]:
            options = ("--step", "charge", "--never-happened", "--reason", "ruled out", "--force", "--yes")
            told = cli.invoke(args=["idempotency", "resolve", record["record"], *options])
            assert 0 == told.exit_code, told.output
            ruled_out.append(record["record"])

    alone = every_crash(shop, send, effects=counts)
    assert {
        "charge: in its function": "in doubt (charge)",
        "charge: after its function": "in doubt (charge)",
    } == {point: end for point, end in alone.ends.items() if end != "201"}
    assert 19 == len(alone.crashes)
    settled = every_crash(shop, send, effects=counts, settle=settle)

    assert {"201"} == set(settled.ends.values())
    assert alone.ends.keys() == settled.ends.keys()
    assert 2 == len(ruled_out), "one of each report"
