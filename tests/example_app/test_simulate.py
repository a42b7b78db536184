from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from sqlalchemy import func, select

from example_app import simulate
from example_app.models import Payment, db
from tests.example_app.conftest import Customer, MakeApp, on_records


def test_off_by_default(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DEMO_SIMULATE=1 a wish is an unknown field, and no response counts executions."""
    monkeypatch.delenv("DEMO_SIMULATE", raising=False)
    customer = Customer(make_app(DEMO_SIMULATE=simulate.wanted()))

    refused, paid = customer.pay("key-1", simulate={"status": 503}), customer.pay("key-2")

    assert (400, ["simulate"]) == (refused.status_code, list(refused.get_json()["errors"]))
    assert 201 == paid.status_code
    assert "X-Executions" not in paid.headers


def test_executions(customer: Customer) -> None:
    """The first response says 1, a replay and a refusal still say 1, and reading runs no business code."""
    answers = [customer.pay("key-1"), customer.pay("key-1"), customer.pay("key-1", amount=1), customer.pay("key-2")]

    assert ["1", "1", "1", "1"] == [answer.headers["X-Executions"] for answer in answers]
    assert "0" == customer.send("GET", "/payments").headers["X-Executions"]
    assert "0" == customer.pay(None).headers["X-Executions"]
    assert "0" == customer.pay("key-3", amount=-1).headers["X-Executions"]


def test_witness_is_not_the_store(make_app: MakeApp) -> None:
    """When the store forgets a key the request runs again, and the witness says so."""
    app = make_app()
    Customer(app).pay("key-1")
    on_records(app, "DELETE FROM idempotency_records")

    again = Customer(app).pay("key-1")

    assert (201, "2") == (again.status_code, again.headers["X-Executions"])


def test_status_once(customer: Customer) -> None:
    """A simulated 503 releases the key; the same request again is past it and succeeds."""
    first = customer.pay("key-1", simulate={"status": 503})
    again = customer.pay("key-1", simulate={"status": 503})

    assert (503, "application/problem+json", "1") == (first.status_code, first.mimetype, first.headers["X-Executions"])
    assert (201, "2") == (again.status_code, again.headers["X-Executions"])
    assert 1 == len(customer.payments())


def test_delay(customer: Customer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay falls between the count and the commit, where a duplicate finds the first one in flight."""
    slept = []

    def sleep(seconds: float) -> None:
        slept.append((seconds, len(customer.payments())))

    monkeypatch.setattr("example_app.simulate.time.sleep", sleep)

    customer.pay("key-1", simulate={"delay": 1.5})

    assert (1.5, 0) in slept
    assert 1 == len(customer.payments())


@pytest.mark.parametrize(("moment", "payments"), (("before_commit", 0), ("after_commit", 1)))
def test_crash(make_app: MakeApp, database: str, monkeypatch: pytest.MonkeyPatch, moment: str, payments: int) -> None:
    """The crash is a SIGKILL to the worker's own process, on the named side of the commit, with the execution counted."""
    customer = Customer(make_app(SQLALCHEMY_DATABASE_URI=database))
    found: list[Any] = []

    def kill(pid: int, number: int) -> None:
        with db.engine.connect() as connection:  # as others see it
            found.extend((pid, number, connection.scalar(select(func.count()).select_from(Payment))))

    monkeypatch.setattr("example_app.simulate.os.kill", kill)

    answer = customer.pay("key-1", simulate={"crash": moment})

    assert [os.getpid(), signal.SIGKILL, payments] == found
    assert "1" == answer.headers["X-Executions"]


def test_crash_in_a_view_that_commits(customer: Customer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash strikes at the commit, in the view or in the library, and only once."""
    found: list[int] = []
    monkeypatch.setattr("example_app.simulate.os.kill", lambda pid, number: found.append(number))
    body = {"account_id": "acc_1", "amount": 1, "currency": "EUR", "simulate": {"crash": "after_commit"}}

    answers = [customer.send("POST", "/gateway/charges", key, body) for key in ("key-1", "key-1", "key-2")]

    assert [201, 201, 201] == [answer.status_code for answer in answers]
    assert [signal.SIGKILL] * 2 == found


WISHES: tuple[Any, ...] = (
    {"delay": -1},
    {"delay": simulate.LONGEST_DELAY_SECONDS + 1},
    {"delay": "NaN"},
    {"status": 200},
    {"status": 600},
    {"crash": "now"},
    {"unknown": 1},
    "crash",
    None,
)


def test_wishes_have_limits(customer: Customer) -> None:
    """The service refuses an unknown wish before any business code runs."""
    for number, wish in enumerate(WISHES):
        answer = customer.pay(f"key-{number}", simulate=wish)

        assert (400, ["simulate"]) == (answer.status_code, list(answer.get_json()["errors"])), wish
        assert "0" == answer.headers["X-Executions"], wish
