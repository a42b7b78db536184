from __future__ import annotations

import pytest

from example_app.auth import CALLERS, Caller
from tests.example_app.conftest import Customer

SOMETHING = {"account": "acc_1", "amount": 1, "currency": "EUR"}


@pytest.mark.parametrize("path", ("/payments", "/gateway/charges", "/api/invoices"))
def test_a_request_without_a_known_token_is_refused(customer: Customer, path: str) -> None:
    """A request without a token gets a 401 problem that says which header to send."""
    for bearer in (None, "tok_mallory", ""):
        answer = customer.send("POST", path, "key-1", SOMETHING, bearer=bearer)

        assert (401, "application/problem+json") == (answer.status_code, answer.mimetype), bearer
        assert answer.headers["WWW-Authenticate"].lower().startswith("bearer"), bearer


def test_other_credentials_are_not_a_token(customer: Customer) -> None:
    """The service refuses a token in any other form with 401, not with 500."""
    others = ("Basic dG9rX2FsaWNlOg==", "Token tok_alice", "tok_alice", "Bearer", "Basic !", "Basic \xff")

    answers = {each: customer.http.get("/payments", headers={"Authorization": each}) for each in others}

    assert dict.fromkeys(others, 401) == {each: answer.status_code for each, answer in answers.items()}


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


@pytest.mark.parametrize("bearer", ("tok_bob", "tok_namesake"), ids=("colleague", "another company"))
def test_the_same_key_of_another_principal_is_another_payment_and_neither_sees_the_other(
    customer: Customer, bearer: str
) -> None:
    """Neither listing, nor reading, nor changing reaches another principal's payment."""
    alices = customer.pay("key-1")
    path = alices.headers["Location"]
    assert [] == customer.payments(bearer=bearer)

    other = customer.pay("key-1", bearer=bearer)

    assert 201 == other.status_code
    assert alices.get_json()["id"] != other.get_json()["id"]
    assert 404 == customer.send("GET", path, bearer=bearer).status_code
    assert 404 == customer.send("PATCH", path, "key-2", {"amount": 1}, bearer=bearer).status_code
    assert [alices.get_json()] == customer.payments()
