"""The real stripe client as our customer, over real connections."""

from __future__ import annotations

from typing import Any

import pytest
import stripe
from stripe._http_client import HTTPClient

from example_app.demo.client import LossyWire
from tests.example_app.conftest import Server


@pytest.fixture(autouse=True)
def impatient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the client's half second between two attempts away, and keeps proxies of this machine out of it."""
    monkeypatch.setattr(HTTPClient, "INITIAL_DELAY", 0)
    monkeypatch.setattr(HTTPClient, "MAX_DELAY", 0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def client(url: str, bearer: str = "tok_alice") -> stripe.StripeClient:
    return stripe.StripeClient(bearer, base_addresses={"api": url}, max_network_retries=2)


def charge(url: str, *, key: str | None = None, bearer: str = "tok_alice", **changes: Any) -> stripe.Charge:
    params: Any = {"amount": 500, "currency": "eur", "source": "tok_visa", "metadata": {"order": "6735"}, **changes}
    options: Any = {"idempotency_key": key} if key is not None else {}
    return client(url, bearer).v1.charges.create(params, options)


def header(made: stripe.Charge, name: str) -> str | None:
    assert made.last_response is not None
    return dict(made.last_response.headers).get(name)


def test_charge(server: Server) -> None:
    """The client reads our response as a charge. It sent a key that it generated."""
    made = charge(server.url)

    assert ("charge", 500, "eur", "succeeded") == (made.object, made.amount, made.currency, made.status)
    assert {"order": "6735"} == made.metadata.to_dict()
    assert (None, "1") == (header(made, "Idempotent-Replayed"), header(made, "X-Executions"))
    assert 1 == len(server.keys)
    assert server.keys[0]


def test_lost_reply(server: Server, wire: LossyWire) -> None:
    """The charge is made, the connection drops, the client retries by itself with the same key: one charge, replayed."""
    wire.lose_next_reply()

    made = charge(wire.url)

    assert 1 == wire.lost
    assert 2 == len(server.keys)
    assert 1 == len(set(server.keys))
    assert ("true", "1") == (header(made, "Idempotent-Replayed"), header(made, "X-Executions"))


@pytest.mark.parametrize("status", (500, 503))
def test_server_error_before_the_view(server: Server, status: int) -> None:
    """A 5xx from in front of the view is not stored: the client's own retry makes the charge."""
    server.refusals.append(status)

    made = charge(server.url)

    assert 2 == len(server.keys)
    assert 1 == len(set(server.keys))
    assert (None, "1") == (header(made, "Idempotent-Replayed"), header(made, "X-Executions"))


def test_key_reused(server: Server) -> None:
    """The same key for another amount raises the client's IdempotencyError without a retry."""
    charge(server.url, key="order-1")

    with pytest.raises(stripe.IdempotencyError) as caught:
        charge(server.url, key="order-1", amount=501)

    assert 400 == caught.value.http_status
    assert 2 == len(server.keys)


@pytest.mark.parametrize(
    ("changes", "bearer", "error"),
    (
        ({"amount": 0}, "tok_alice", stripe.InvalidRequestError),
        ({}, "tok_mallory", stripe.AuthenticationError),
    ),
)
def test_errors(server: Server, changes: dict[str, Any], bearer: str, error: type[stripe.StripeError]) -> None:
    """Each error of ours has a class in the client."""
    with pytest.raises(error):
        charge(server.url, bearer=bearer, **changes)

    assert 1 == len(server.keys)
