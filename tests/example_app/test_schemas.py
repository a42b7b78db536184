"""Malformed input to each endpoint of the example: 400 from its schema, and no row that a retry or a reader could find."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask
from sqlalchemy import func, select
from werkzeug.test import TestResponse

from example_app.models import Charge, GatewayCharge, Invoice, Payment, db
from tests.example_app.conftest import Customer, MakeApp

# A lone surrogate, as bytes on the wire: JSON can spell what no text can hold.
SURROGATE = rb"\ud800"

NAMES = {
    "nul": rb'"a\u0000b"',
    "control character": rb'"a\u001bb"',
    "line break at its end": rb'"acme\n"',
    "C1 control character": rb'"a\u0085b"',
    "lone surrogate": b'"' + SURROGATE + b'"',
    "lone low surrogate": rb'"a\udfffb"',
    "reversed pair": rb'"\ude00\ud83d"',
    "line separator": rb'"a\u2028b"',
    "empty": b'""',
    "spaces": b'"   "',
    "too long": b'"' + b"x" * 65 + b'"',
    "number": b"7",
    "null": b"null",
    "list": b'["acme"]',
    "deep": b"[" * 200 + b"]" * 200,
}
AMOUNTS = {
    "true": b"true",
    "false": b"false",
    "zero": b"0",
    "negative": b"-1",
    "fraction": b"10.5",
    "float": b"10.0",
    "exponent": b"1e2",
    "text": b'"1050"',
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "beyond a double": b"1e400",
    "beyond a row": b"2147483648",
    "beyond a double's integers": b"9007199254740993",
    "5000 digits": b"9" * 5000,
    "null": b"null",
    "list": b"[1050]",
}
CURRENCIES = {
    "line break at its end": rb'"EUR\n"',
    "full-width": '"ＥＵＲ"'.encode(),
    "dotless i": '"ıSK"'.encode(),
    "long s": '"uſd"'.encode(),
    "two letters": b'"EU"',
    "four letters": b'"EURO"',
    "nul": rb'"EUR\u0000"',
    "lone surrogate": b'"EU' + SURROGATE + b'"',
}
BODIES = {
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and cut off": b"[" * 100_000,
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"account": "\xff"}',
    "list": b"[]",
    "text": b'"EUR"',
    "number": b"1",
    "null": b"null",
    "unknown member": b'{"account": "a", "amount": 1, "currency": "EUR", "extra": 1}',
    "unknown member without a name": b'{"": 1}',
    "unknown member that is no text": b'{"' + SURROGATE + b'": 1}',
}

MONEY = (("amount", AMOUNTS), ("currency", CURRENCIES))
NAMED = {"/payments": "account", "/api/invoices": "customer", "/gateway/charges": "account_id"}


def body(name: str, **members: bytes) -> bytes:
    wanted = {name: b'"acme"', "amount": b"1050", "currency": b'"EUR"', **members}
    return b"{" + b",".join(json.dumps(key).encode() + b":" + value for key, value in wanted.items()) + b"}"


def send(
    app: Flask,
    path: str,
    data: Any,
    *,
    method: str = "POST",
    media_type: str = "application/json",
    key: str | None = None,
) -> TestResponse:
    """Send a request, with a new key if none is given."""
    key = key or uuid4().hex
    headers = {"Authorization": "Bearer tok_alice", "Idempotency-Key": key, "X-Idempotency-Key": key}
    return app.test_client().open(path, method=method, data=data, content_type=media_type, headers=headers)


def rows(app: Flask) -> int:
    with app.app_context():
        return sum(
            db.session.scalar(select(func.count()).select_from(model)) or 0
            for model in (Payment, Charge, Invoice, GatewayCharge)
        )


@pytest.fixture
def production(make_app: MakeApp) -> Flask:
    """The app turns errors into responses, as in production."""
    return make_app(TESTING=False)


def assert_refused(answer: TestResponse, *names: str, shape: str = "") -> None:
    """With these names in `errors`, if any are given."""
    assert 400 == answer.status_code, (shape, answer.text)
    assert "application/problem+json" == answer.content_type
    assert not names or list(names) == list(answer.get_json()["errors"]), shape


@pytest.mark.parametrize("path", NAMED)
def test_malformed_body_is_refused(production: Flask, path: str) -> None:
    """The retry gets the same response."""
    for number, (shape, data) in enumerate(BODIES.items()):
        for _ in range(1 if number else 2):
            assert_refused(send(production, path, data, key=shape.replace(" ", "-")), shape=shape)
    assert 0 == rows(production)


@pytest.mark.parametrize(
    ("path", "name", "values"),
    # Their schemas inherit the amount and the currency from one.
    (*((path, name, NAMES) for path, name in NAMED.items()), *(("/payments", *each) for each in MONEY)),
)
def test_malformed_member_is_refused(production: Flask, path: str, name: str, values: dict[str, bytes]) -> None:
    for shape, value in values.items():
        refused = send(production, path, body(NAMED[path], **{name: value}))
        # Python's parser refuses a number of 5000 digits before any schema sees it.
        assert_refused(refused, *([] if shape == "5000 digits" else [name]), shape=shape)
    assert 0 == rows(production)


@pytest.mark.parametrize("name", ["timestamp", "trace_id"])
def test_ignored_member_of_a_gateway_charge_is_checked(production: Flask, name: str) -> None:
    """The schema checks a field that the fingerprint ignores."""
    for value in ("[" * 5000, "[" * 5000 + "]" * 5000, '"' + "x" * 2000 + '"', r'"\ud800"', r'"\u0000"', "true", "NaN"):
        assert_refused(send(production, "/gateway/charges", body("account_id", **{name: value.encode()})), shape=value)
    assert 0 == rows(production)


def test_timestamp_of_a_gateway_charge_may_be_a_number_or_text(production: Flask) -> None:
    for value in (b"1753000000", b"1753000000.5", b'"2025-07-20T08:00:00Z"'):
        assert 201 == send(production, "/gateway/charges", body("account_id", timestamp=value)).status_code


WISHES = [
    b"null",
    b"[]",
    b"1",
    b'{"delay": NaN}',
    b'{"delay": 1e400}',
    b'{"status": true}',
    b'{"status": 200}',
    b'{"crash": ["before_commit"]}',
    b'{"crash": "\\ud800"}',
    b"[" * 5000,
]


def test_malformed_wish_is_refused(production: Flask) -> None:
    for wish in WISHES:
        assert_refused(send(production, "/payments", body("account", simulate=wish)), shape=repr(wish))
    assert 0 == rows(production)


FORM = "application/x-www-form-urlencoded"
FIELDS = [
    *({"amount": amount} for amount in ("１０５０", "١٠٥٠", "1_050", " 1050", "1050\n", "+1050", "-1", "10.5", "1e3")),
    *({"amount": amount} for amount in ("true", "9" * 5000, "")),
    *({"currency": currency} for currency in ("usd\n", "USD", "ｕｓｄ")),
    *({"description": description} for description in ("a\0b", "a\x1b[2Jb", "x" * 1001)),
    *({"customer": customer} for customer in ("cus\0", "")),
    {"source": "tok\0"},
    {"capture": "perhaps"},
    *({name: "1"} for name in ("metadata[a", "metadata", "metadata[]", "metadata[a\0]", "")),
    {"metadata[a]": "1\0"},
]


def test_malformed_charge_is_refused(production: Flask) -> None:
    """The error has the form of Stripe."""
    for changes in FIELDS:
        answer = send(production, "/v1/charges", {"amount": "1050", "currency": "usd", **changes}, media_type=FORM)
        assert 400 == answer.status_code, (changes, answer.text)
        assert "invalid_request_error" == answer.get_json()["error"]["type"]
    assert 0 == rows(production)


def test_charge_that_is_no_form_is_refused(production: Flask) -> None:
    for media_type in ("application/json", "text/plain"):
        answer = send(production, "/v1/charges", b"[" * 100_000, media_type=media_type)
        assert (400, "invalid_request_error") == (answer.status_code, answer.get_json()["error"]["type"])


def test_text_beyond_ascii_is_welcome(production: Flask) -> None:
    """An emoji comes as a pair of surrogates, which is no error."""
    answer = send(production, "/payments", body("account", account=rb'"Ren\u00e9e \ud83d\ude00 \u5c71\u7530"'))

    assert (201, "Renée 😀 山田") == (answer.status_code, answer.get_json()["account"])


def test_no_database_sees_what_it_cannot_hold(make_app: MakeApp, database: str) -> None:
    """PostgreSQL refuses NUL, its driver lone surrogates, and SQLite takes the first. No row has such an id either."""
    app = make_app(TESTING=False, SQLALCHEMY_DATABASE_URI=database)

    for shape in ("nul", "lone surrogate", "control character"):
        assert_refused(send(app, "/payments", body("account", account=NAMES[shape])), "account")
    charge = send(app, "/v1/charges", {"amount": "1", "currency": "usd", "description": "\0"}, media_type=FORM)
    assert 400 == charge.status_code
    for name in ("%00", "a%00b", "%ff", "x" * 5000):
        assert 404 == send(app, f"/payments/{name}", None, method="GET").status_code
        assert 404 == send(app, f"/payments/{name}", b'{"amount": 1}', method="PATCH").status_code
        assert 404 == send(app, f"/api/invoices/{name}", body("customer"), method="PUT").status_code
    assert 0 == rows(app)


def test_malformed_change_changes_nothing(customer: Customer, production: Flask) -> None:
    paid = customer.pay("first").get_json()

    for member in (b'"amount": true', rb'"account": "\u0000"', rb'"currency": "EUR\n"', b'"amount": null'):
        changed = send(production, f"/payments/{paid['id']}", b"{" + member + b"}", method="PATCH")
        assert_refused(changed, shape=repr(member))
    assert [paid] == customer.payments()
