from __future__ import annotations

import pytest

from example_app.auth import CALLERS, Caller
from tests.example_app.conftest import Customer

SOMETHING = {"account": "acc_1", "amount": 1, "currency": "EUR"}


@pytest.mark.parametrize(
    ("method", "path"),
    (("GET", "/payments"), ("POST", "/payments"), ("POST", "/gateway/charges"), ("POST", "/api/invoices")),
)
@pytest.mark.parametrize("bearer", (None, "tok_mallory", ""))
def test_a_request_without_a_known_token_is_refused(
    customer: Customer, method: str, path: str, bearer: str | None
) -> None:
    """A request without a token gets a 401 problem that says which header to send."""
    answer = customer.send(method, path, "key-1", SOMETHING, bearer=bearer)

    assert (401, "application/problem+json") == (answer.status_code, answer.mimetype)
    assert answer.headers["WWW-Authenticate"].lower().startswith("bearer")


@pytest.mark.parametrize(
    "credentials", ("Basic dG9rX2FsaWNlOg==", "Token tok_alice", "tok_alice", "Bearer", "Basic !", "Basic \xff")
)
def test_other_credentials_are_not_a_token(customer: Customer, credentials: str) -> None:
    """The service refuses a token in any other form with 401, not with 500."""
    answer = customer.http.get("/payments", headers={"Authorization": credentials})

    assert 401 == answer.status_code


def test_a_stored_answer_is_not_shown_to_a_stranger(customer: Customer) -> None:
    """A client with the key but without a token does not get the response."""
    customer.pay("key-1")

    answer = customer.send("POST", "/payments", "key-1", SOMETHING, bearer=None)

    assert 401 == answer.status_code
    assert b"pay_" not in answer.data


@pytest.fixture(autouse=True)
def namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another company's Alice: only her tenant tells her apart."""
    monkeypatch.setitem(CALLERS, "tok_namesake", Caller("globex", "alice"))


@pytest.mark.parametrize("bearer", ("tok_bob", "tok_carol", "tok_namesake"))
def test_same_key_of_another_principal_is_another_payment(customer: Customer, bearer: str) -> None:
    """The same key of a colleague, or of another company, names another payment."""
    alices = customer.pay("key-1")

    answer = customer.pay("key-1", bearer=bearer)

    assert 201 == answer.status_code
    assert alices.get_json()["id"] != answer.get_json()["id"]
    assert [alices.get_json()] == customer.payments()


@pytest.mark.parametrize("bearer", ("tok_bob", "tok_carol", "tok_namesake"))
def test_payments_of_others_do_not_exist(customer: Customer, bearer: str) -> None:
    """Neither listing, nor reading, nor changing reaches another principal's payment."""
    path = customer.pay("key-1").headers["Location"]

    assert [] == customer.payments(bearer=bearer)
    assert 404 == customer.send("GET", path, bearer=bearer).status_code
    assert 404 == customer.send("PATCH", path, "key-2", {"amount": 1}, bearer=bearer).status_code
    assert 1050 == customer.send("GET", path).get_json()["amount"]
