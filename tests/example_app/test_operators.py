"""The console of the example: who may open it, and over what."""

from __future__ import annotations

from base64 import b64encode
from hmac import compare_digest

import pytest
from flask import Flask
from flask.testing import FlaskClient

from example_app import operators
from example_app.operators import OPERATORS
from tests.example_app.conftest import Customer, MakeApp

PAGE = "/idempotency/records"


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_opens_the_console_with_their_password(client: FlaskClient, name: str) -> None:
    page = client.get(PAGE, auth=(name, OPERATORS[name].password))

    assert 200 == page.status_code
    assert name in page.text


@pytest.mark.parametrize(
    ("name", "password"),
    (
        ("dana", "op_gus"),
        ("dana", ""),
        ("dana", "op_dana "),
        ("Dana", "op_dana"),
        ("", ""),
        ("mallory", ""),
        ("mallory", "op_dana"),
        ("dana", "op_dän"),
    ),
)
def test_any_other_name_or_password_is_refused(client: FlaskClient, name: str, password: str) -> None:
    page = client.get(PAGE, auth=(name, password))

    assert 401 == page.status_code
    assert page.headers["WWW-Authenticate"] == 'Basic realm="idempotency console", charset="UTF-8"'
    assert "op_" not in page.text


@pytest.mark.parametrize(
    "header", (None, "Bearer tok_alice", "Basic", "Basic !", "Basic " + b64encode(b"dana").decode(), "Basic \xff")
)
def test_other_credentials_are_refused(client: FlaskClient, header: str | None) -> None:
    page = client.get(PAGE, headers={} if header is None else {"Authorization": header})

    assert (401, True) == (page.status_code, page.headers["WWW-Authenticate"].startswith("Basic "))


def test_passwords_are_compared_in_constant_time_also_for_an_unknown_name(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(operators, "compare_digest", compare)
    for name in ("dana", "mallory"):
        client.get(PAGE, auth=(name, "guess"))

    assert [(b"guess", b"op_dana"), (b"guess", b"")] == compared


def test_an_operator_of_one_company_sees_its_records_alone(customer: Customer, client: FlaskClient) -> None:
    customer.pay("key-1")
    customer.pay("key-2", bearer="tok_carol")

    everything, acme = (
        client.get(f"{PAGE}?state=completed", auth=(name, OPERATORS[name].password)).text for name in ("dana", "gus")
    )

    assert ("acme" in everything, "globex" in everything) == (True, True)
    assert ("acme" in acme, "globex" in acme) == (True, False)
    assert 403 == client.get("/idempotency/", auth=("gus", "op_gus")).status_code


def test_a_token_of_a_customer_opens_no_page_and_an_operator_pays_nothing(customer: Customer) -> None:
    page = customer.http.get(PAGE, headers={"Authorization": "Bearer tok_alice"})
    paid = customer.http.post("/payments", json={}, auth=("dana", "op_dana"), headers={"Idempotency-Key": "key-1"})

    assert (401, 401) == (page.status_code, paid.status_code)


@pytest.mark.parametrize(("allowed", "status"), ((False, 403), (True, 200)))
def test_plain_http_is_refused_unless_the_configuration_allows_it(
    make_app: MakeApp, allowed: bool, status: int
) -> None:
    app = make_app(TESTING=False, CONSOLE_ALLOW_HTTP=allowed)

    assert status == app.test_client().get(PAGE, auth=("dana", "op_dana")).status_code


def test_the_console_needs_https_by_default(make_app: MakeApp) -> None:
    assert make_app().config["CONSOLE_ALLOW_HTTP"] is False
