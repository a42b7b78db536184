"""The shop page without a browser: who its visitors are, and how often their forms pay."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import select
from werkzeug.test import TestResponse

from example_app.models import Payment, db
from example_app.shop import PRICES
from tests.example_app.conftest import MakeApp

SECRET_KEY = "k-5d1f70c2a9e84b36"


class Forms(HTMLParser):
    """The forms of a page: the hidden key of each by its id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.keys: dict[str, str] = {}
        self._form = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self._form = given["id"] or ""
        elif given.get("name") == "idempotency_key":
            self.keys[self._form] = given["value"] or ""


@pytest.fixture
def app(make_app: MakeApp) -> Flask:
    return make_app(SECRET_KEY=SECRET_KEY)


@pytest.fixture
def visitor(app: Flask) -> FlaskClient:
    return app.test_client()


def opened(visitor: FlaskClient) -> dict[str, str]:
    return Forms(visitor.get("/shop").text).keys


def pay(visitor: FlaskClient, key: str | None, item: str = "tea") -> TestResponse:
    return visitor.post("/shop/orders", data={"item": item} | ({} if key is None else {"idempotency_key": key}))


def payments(app: Flask) -> list[tuple[str, str, int]]:
    with app.app_context():
        rows = db.session.execute(select(Payment.tenant, Payment.account, Payment.amount))
        return [(tenant, account, amount) for tenant, account, amount in rows]


def test_a_form_that_is_sent_twice_pays_once(app: Flask, visitor: FlaskClient) -> None:
    key = opened(visitor)["plain"]
    first, second = pay(visitor, key), pay(visitor, key)

    assert (303, 303) == (first.status_code, second.status_code)
    assert first.location == second.location
    assert "true" == second.headers["Idempotency-Replayed"]
    assert [("shop", "tea", PRICES["tea"])] == payments(app)
    paid = visitor.get(first.location)
    assert (200, True) == (paid.status_code, "4.50 EUR" in paid.text)
    assert 1 == visitor.get("/shop").text.count('class="payment"')


def test_each_form_and_each_page_has_its_own_key(app: Flask, visitor: FlaskClient) -> None:
    keys = [*opened(visitor).values(), *opened(visitor).values()]
    for key in keys:
        pay(visitor, key)

    assert 4 == len(set(keys)) == len(payments(app))


def test_only_a_visitor_pays(app: Flask) -> None:
    """Without a cookie, with a forged one and with a token the form is refused."""
    forged = app.test_client()
    forged.set_cookie("session", "eyJ2aXNpdG9yIjoiYWxpY2UifQ.aSL0Bg.AAAAAAAAAAAAAAAAAAAAAAAAAAA")
    for sender, headers in (
        (app.test_client(), {}),
        (forged, {}),
        (app.test_client(), {"Authorization": "Bearer tok_alice"}),
    ):
        refused = sender.post("/shop/orders", data={"item": "tea", "idempotency_key": "k" * 20}, headers=headers)

        assert 401 == refused.status_code
    assert [] == payments(app)


def test_another_site_cannot_pay_for_a_visitor(visitor: FlaskClient) -> None:
    cookie = visitor.get("/shop").headers["Set-Cookie"]

    assert re.search(r"; SameSite=Lax\b", cookie)
    assert re.search(r"; HttpOnly\b", cookie)


def test_the_page_loads_its_scripts_and_nothing_from_elsewhere(visitor: FlaskClient) -> None:
    page = visitor.get("/shop")
    scripts = re.findall(r'<script type="module" src="([^"]+)"></script>', page.text)

    assert ["/idempotency.js", "/static/shop.js"] == scripts
    # Without the cookie: scripts are for everyone.
    stranger = visitor.application.test_client()
    for script in scripts:
        with stranger.get(script) as answer:
            assert "text/javascript" == answer.mimetype
    assert "no-store" == page.headers["Cache-Control"]
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(
        page.headers["Content-Security-Policy"].split("; ")
    )
    assert "<script>" not in page.text


def test_without_a_secret_key_there_is_no_shop(make_app: MakeApp) -> None:
    assert 401 == make_app().test_client().get("/shop").status_code
