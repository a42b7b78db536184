"""The dialect of the gateway."""

from __future__ import annotations

from tests.example_app.conftest import Customer

GATEWAY_CHARGE = {"account_id": "acc_1", "amount": 100, "currency": "EUR"}


def test_playbook(customer: Customer) -> None:
    """A new timestamp and trace id do not make it another request; a replay is a cache hit with two headers."""
    first = customer.send("POST", "/gateway/charges", "key-1", {**GATEWAY_CHARGE, "timestamp": 1, "trace_id": "a"})
    again = customer.send("POST", "/gateway/charges", "key-1", {**GATEWAY_CHARGE, "timestamp": 2, "trace_id": "b"})

    assert (201, first.data) == (again.status_code, again.data)
    assert ("true", "HIT") == (again.headers["X-Idempotency-Replayed"], again.headers["X-Cache-Lookup"])


def test_playbook_mismatch(customer: Customer) -> None:
    """Another amount is a 409 in this dialect."""
    customer.send("POST", "/gateway/charges", "key-1", GATEWAY_CHARGE)

    answer = customer.send("POST", "/gateway/charges", "key-1", {**GATEWAY_CHARGE, "amount": 101})

    assert (409, "idempotency_payload_mismatch") == (answer.status_code, answer.get_json()["error_code"])
