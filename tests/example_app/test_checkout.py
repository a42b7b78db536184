"""The checkout: four effects, each once, whatever happens to its worker. Effects are counted at the other companies."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
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

ROOT = Path(__file__).parents[2]
WORKER_SECONDS = 60
ROUNDS = 500
ORDER = {"item": "tea", "card": "tok_visa"}
NAMES = ("SQLALCHEMY_DATABASE_URI", "DEMO_SIMULATE", "DEMO_WITNESS", "DEMO_PROVIDERS", "IDEMPOTENCY_SECRET")


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


class Worker:
    """A process that sends one checkout to its own copy of the application."""

    def __init__(self, app: Flask, body: dict[str, Any], *, key: str = "key-1") -> None:
        config = json.dumps({name: app.config[name] for name in NAMES})
        command = [sys.executable, "-m", "tests.example_app.checkout_worker", config, key, json.dumps(body)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> int:
        """Return its exit code, once it has ended."""
        _, self.errors = self.process.communicate(timeout=WORKER_SECONDS)
        return self.process.returncode


@pytest.fixture
def shop(make_app: MakeApp, database: str) -> Flask:
    return make_app(SQLALCHEMY_DATABASE_URI=database)


def lose_a_worker(app: Flask, moment: str) -> None:
    worker = Worker(app, {**ORDER, "simulate": {"step": moment}})
    assert -signal.SIGKILL == worker.end(), worker.errors
    end_leases(app)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left"),
    (("behind_charge", (1, 1, 0, 0)), ("before_commit", (1, 1, 0, 0)), ("after_commit", (1, 1, 0, 1))),
)
def test_a_retry_goes_on_behind_the_finished_steps(shop: Flask, moment: str, left: tuple[int, int, int, int]) -> None:
    lose_a_worker(shop, moment)
    assert left == effects(shop)

    answers = [check_out(Customer(shop), simulate={"step": moment}) for _ in range(2)]

    assert [201, 201] == [answer.status_code for answer in answers]
    assert answers[0].data == answers[1].data
    assert "2" == answers[1].headers["X-Executions"]
    assert (1, 1, 1, 1) == effects(shop)


@pytest.mark.slow
def test_a_resolver_finds_the_charge_in_doubt(shop: Flask) -> None:
    """The provider took the money and the service does not know it: no retry goes on before the resolver has asked."""
    lose_a_worker(shop, "in_charge")
    customer = Customer(shop)

    refused = check_out(customer, simulate={"step": "in_charge"})
    assert (409, "outcome-unknown") == (refused.status_code, refused.get_json()["code"])
    assert (1, 1, 0, 0) == effects(shop)

    janitor_of(shop).run("reap", Batcher())

    answers = [check_out(customer, simulate={"step": "in_charge"}) for _ in range(2)]
    assert [201, 201] == [answer.status_code for answer in answers]
    assert (1, 1, 1, 1) == effects(shop)


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


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_kills(shop: Flask) -> None:
    """SIGKILL at a random instant, then retries. No checkout charges or writes twice, and none stays stuck."""
    longest, stuck = 0.0, 0
    for number in range(ROUNDS):
        key = f"round-{number}"
        before = effects(shop)
        worker = Worker(shop, ORDER, key=key)
        assert worker.process.stdout is not None
        worker.process.stdout.readline()  # it sends its request now
        began = time.monotonic()
        if number % 20:
            time.sleep(random.uniform(0, longest * 1.1))
            worker.process.kill()
        worker.end()
        if not number % 20:
            longest = max(longest, time.monotonic() - began)
        customer = Customer(shop)
        answer = check_out(customer, key)
        if answer.status_code == 409:
            end_leases(shop)
            answer = check_out(customer, key)
        if answer.status_code == 409:
            stuck += 1
            janitor_of(shop).run("reap", Batcher())
            made = tuple(now - then for now, then in zip(effects(shop), before, strict=True))
            if made[1] == 0:
                # Nothing was charged, and only a person may rule that out.
                assert made[2:] == (0, 0)
                continue
            answer = check_out(customer, key)
        made = tuple(now - then for now, then in zip(effects(shop), before, strict=True))
        assert (201, (1, 1, 1, 1)) == (answer.status_code, made), f"round {number}"
    assert stuck < ROUNDS
