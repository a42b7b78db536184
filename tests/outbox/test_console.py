"""The page of the console that shows, retries and discards what an outbox has not sent."""

from __future__ import annotations

import json
import re

import pytest
from werkzeug.test import TestResponse

from flask_idempotency.console import Console
from flask_idempotency.engine.events import MessageSettled
from flask_idempotency.engine.outbox import Message, Undeliverable
from tests.console.rig import ANN, LIMITED, VIEWER, Browser, authorize
from tests.outbox.conftest import Shop, on_each


def kill(message: Message) -> Exception | None:
    return Undeliverable("too large") if b"dead" in message.body else None


def broken(message: Message) -> Exception | None:
    return kill(message) or ValueError("secret-body")


def browser_of(shop: Shop, name: str = ANN) -> Browser:
    if "idempotency_console" not in shop.app.blueprints:
        shop.app.testing = True
        shop.app.register_blueprint(Console(shop.idempotency, authorize=authorize))
    return Browser(shop.app.test_client(), name)


def failed(shop: Shop) -> None:
    """Leave a dead and a failing message of one topic, one that waits behind, and one of another topic."""
    shop.sent.fail = broken
    shop.publish("orders", "dead", key="secret-key")
    shop.publish("orders", "behind", key="secret-key")
    shop.publish("orders", "later")
    shop.publish("refunds", "later")
    shop.drain()


def row(page: TestResponse, name: str) -> list[str]:
    found = re.search(rf'<th scope="row"[^>]*>(?:<bdi>)?{name}(?:</bdi>)?</th>(.*?)</tr>', page.text, re.DOTALL)
    assert found is not None
    return [re.sub("<.*?>", "", each) for each in re.findall(r"<td[^>]*>(.*?)</td>", found[1], re.DOTALL)]


def settled(shop: Shop) -> list[tuple[str, str, str, str]]:
    return [
        (each.verb, each.operation, each.actor, each.reason) for each in shop.events if isinstance(each, MessageSettled)
    ]


@on_each
def test_the_page_sums_up_topics_and_shows_no_body_and_no_key(shop: Shop) -> None:
    browser = browser_of(shop)
    failed(shop)

    page = browser.get("/outbox")

    assert ["1", "1", "1"] == row(page, "orders")[:3]
    assert ["0", "1", "0"] == row(page, "refunds")[:3]
    assert "too large" in page.text
    assert "ValueError" in page.text
    assert not re.search("secret-key|secret-body|&#34;dead", page.text)
    assert 'aria-current="page">Outbox</a>' in page.text


@on_each
def test_all_that_failed_of_a_topic_is_sent_again(shop: Shop) -> None:
    browser = browser_of(shop)
    failed(shop)
    shop.sent.fail = lambda message: None

    done = browser.post("/outbox/retry", {**browser.form("/outbox/retry?topic=orders"), "reason": "repaired"})

    assert "Messages retried: 2." in done.text
    assert {("retried", "orders", ANN, "repaired")} == set(settled(shop))
    shop.drain()
    assert sorted((b'"dead"', b'"behind"', b'"later"')) == sorted(shop.sent.bodies)
    assert ["refunds"] == [each.topic for each in shop.rows()]


def test_everything_that_failed_is_sent_again(shop: Shop) -> None:
    browser = browser_of(shop)
    failed(shop)
    shop.sent.fail = lambda message: None

    assert 200 == browser.post("/outbox/retry", {**browser.form("/outbox/retry"), "reason": "repaired"}).status_code

    shop.drain()
    assert [] == shop.rows()
    assert 4 == len(shop.sent.bodies)


def test_a_message_is_discarded_when_its_number_is_typed(shop: Shop) -> None:
    browser = browser_of(shop)
    failed(shop)
    dead = shop.rows()[0].seq
    path = f"/outbox/discard?seq={dead}"

    wrong = browser.post("/outbox/discard", {**browser.form(path), "reason": "by hand", "typed": "0"})
    without = browser.post("/outbox/discard", {**browser.form(path), "typed": str(dead)})
    assert (400, 400, 4) == (wrong.status_code, without.status_code, len(shop.rows()))

    done = browser.post("/outbox/discard", {**browser.form(path), "reason": "by hand", "typed": str(dead)})

    assert 200 == done.status_code
    assert [("discarded", "orders", ANN, "by hand")] == settled(shop)
    assert dead not in [each.seq for each in shop.rows()]


def test_a_message_that_has_not_failed_stays(shop: Shop) -> None:
    browser = browser_of(shop)
    failed(shop)
    behind = shop.rows()[1].seq
    fields = {**browser.form(f"/outbox/discard?seq={behind}"), "reason": "by hand", "typed": str(behind)}

    page = browser.post("/outbox/discard", fields)

    assert 409 == page.status_code
    assert "whose last attempt failed" in page.text
    assert 4 == len(shop.rows())


@pytest.mark.parametrize("operator", (VIEWER, LIMITED))
def test_an_operator_who_may_not_changes_nothing(shop: Shop, operator: str) -> None:
    browser_of(shop)
    failed(shop)
    browser = browser_of(shop, operator)

    seen = browser.get("/outbox")
    answers = [
        browser.get("/outbox/retry"),
        browser.post("/outbox/retry"),
        browser.post("/outbox/discard", {"seq": "1"}),
    ]

    assert (200 if operator == VIEWER else 403) == seen.status_code
    assert "Retry" not in seen.text
    assert {403} == {each.status_code for each in answers}
    assert [] == settled(shop)


def test_the_command_has_the_same_topics(shop: Shop) -> None:
    browser_of(shop)
    failed(shop)

    told = json.loads(shop.app.test_cli_runner().invoke(args=["idempotency", "outbox", "list", "--json"]).output)

    assert [("orders", 1, 1, 1), ("refunds", 0, 1, 0)] == [
        (each["topic"], each["dead"], each["failing"], each["waiting"]) for each in told["topics"]
    ]
    assert "too large" in told["topics"][0]["error"] + told["messages"][0]["error"]


@pytest.mark.parametrize("fields", ({}, {"console_token": "0" * 64}))
def test_a_form_that_the_console_did_not_make_changes_nothing(shop: Shop, fields: dict[str, str]) -> None:
    browser = browser_of(shop)
    failed(shop)
    browser.form("/outbox/retry")

    assert 403 == browser.post("/outbox/retry", {**fields, "reason": "repaired"}).status_code
    assert [] == settled(shop)


@pytest.mark.parametrize("query", ("seq=0", "seq=-1", "seq=9" + "9" * 30, "topic=a%0Ab", "topic=%3Cb%3E"))
def test_a_faulty_name_of_a_message_gives_400(shop: Shop, query: str) -> None:
    assert 400 == browser_of(shop).get(f"/outbox/retry?{query}").status_code
