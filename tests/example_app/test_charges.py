"""Charges in the dialect of Stripe."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.example_app.conftest import Customer, MakeApp


def charge(customer: Customer, key: str | None = "key-1", **fields: Any) -> TestResponse:
    form = {"amount": 500, "currency": "eur", **fields}
    return customer.send("POST", "/v1/charges", key, data=form)


def test_stripe_charge(customer: Customer) -> None:
    """A charge looks like one of Stripe's, and its retry says so in Stripe's header."""
    first = charge(customer, **{"metadata[order]": "6735"})
    again = charge(customer, **{"metadata[order]": "6735"})

    document = first.get_json()
    assert {"object": "charge", "amount": 500, "currency": "eur", "status": "succeeded"}.items() <= document.items()
    assert document["id"].startswith("ch_")
    assert {"order": "6735"} == document["metadata"]
    assert "Idempotent-Replayed" not in first.headers
    assert (200, first.data, "true") == (again.status_code, again.data, again.headers["Idempotent-Replayed"])
    assert first.headers["Request-Id"] != again.headers["Request-Id"]


@pytest.mark.parametrize(
    ("fields", "param"), (({"amount": "0"}, "amount"), ({"currency": "EUR"}, "currency"), ({"amuont": "5"}, "amuont"))
)
def test_stripe_invalid_input(customer: Customer, fields: dict[str, str], param: str) -> None:
    """Invalid input is Stripe's invalid_request_error, which names the parameter."""
    answer = charge(customer, **fields)

    assert 400 == answer.status_code
    assert ("invalid_request_error", param) == (answer.get_json()["error"]["type"], answer.get_json()["error"]["param"])


def test_a_fault_on_request_is_a_field_of_the_form(customer: Customer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is killed behind its commit: the charge is there, and its key is not settled."""
    killed: list[int] = []
    monkeypatch.setattr("example_app.simulate.os.kill", lambda _, number: killed.append(number))

    charge(customer, **{"simulate[crash]": "after_commit"})

    assert [signal.SIGKILL] == killed


def test_without_simulation_a_fault_is_an_unknown_field(make_app: MakeApp) -> None:
    customer = Customer(make_app(DEMO_SIMULATE=False))

    answer = charge(customer, **{"simulate[crash]": "after_commit"})

    assert (400, "simulate") == (answer.status_code, answer.get_json()["error"]["param"])
