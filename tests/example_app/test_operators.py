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


REFUSED = {
    name: "Basic " + b64encode(name.encode()).decode()
    for name in (
        "dana:op_gus",
        "dana:",
        "dana:op_dana ",
        "Dana:op_dana",
        ":",
        "mallory:",
        "mallory:op_dana",
        "dana:op_dän",
    )
} | {
    name: name
    for name in ("Bearer tok_alice", "Basic", "Basic !", f"Basic {b64encode(b'dana').decode()}", "Basic \xff")
}


def test_any_other_name_or_password_or_credential_is_refused(client: FlaskClient) -> None:
    for name, header in {"none": None, **REFUSED}.items():
        page = client.get(PAGE, headers={} if header is None else {"Authorization": header})

        assert 401 == page.status_code, name
        assert page.headers["WWW-Authenticate"] == 'Basic realm="idempotency console", charset="UTF-8"', name
        assert "op_" not in page.text, name


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

    assert ("dana" in everything, "acme" in everything, "globex" in everything) == (True, True, True)
    assert ("gus" in acme, "acme" in acme, "globex" in acme) == (True, True, False)
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
