"""The customers that go on after the tour, and the operator who reads pages as a browser would."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from example_app.demo import customers as module
from example_app.demo.client import PATIENCE_SECONDS
from example_app.demo.customers import BURST_ROUNDS, customers
from example_app.demo.operator import Page

SHOP: Any = object()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0)


def test_customers_play_other_rounds_than_the_tour_until_the_demo_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    third = threading.Event()

    def play(shop: object, number: int) -> None:
        assert shop is SHOP
        played.append(number)
        if len(played) == 3:
            third.set()

    monkeypatch.setattr(module, "play", play)
    with customers(SHOP):
        assert third.wait(PATIENCE_SECONDS)

    assert played[:3] == [BURST_ROUNDS, BURST_ROUNDS + 1, BURST_ROUNDS + 2]
    assert "customers" not in {thread.name for thread in threading.enumerate()}


def test_customers_go_on_after_a_worker_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo prints a request that kills one."""
    again = threading.Event()

    def play(_: object, number: int) -> None:
        if number == BURST_ROUNDS:
            raise httpx.RemoteProtocolError("the connection dropped")
        again.set()

    monkeypatch.setattr(module, "play", play)
    with customers(SHOP):
        assert again.wait(PATIENCE_SECONDS)


HTML = """<a href="/idempotency/records/a1?x=1&amp;y=2">a1</a><a>no address</a>
<form action="/idempotency/records"><input name="state" value="quarantined"></form>
<form method="post" action="settle">
  <input type="hidden" name="token" value="&lt;t&gt;"><input type="radio" name="outcome" value="happened">
  <input type="radio" name="outcome" value="never" checked><textarea name="reason"></textarea>
  <input type="checkbox" name="sure" value="yes"><button name="step" value="confirm">Settle</button>
  <input type="submit" name="go" value="Go"><input value="without a name">
</form>"""


def page() -> Page:
    request = httpx.Request("GET", "http://127.0.0.1/idempotency/records/a1/settle")
    return Page(httpx.Response(200, text=HTML, request=request))


def test_an_operator_follows_links_and_sends_what_a_browser_would() -> None:
    form = page().form("/settle")

    assert page().link("/records/") == "http://127.0.0.1/idempotency/records/a1?x=1&y=2"
    assert form.action == "http://127.0.0.1/idempotency/records/a1/settle"
    assert form.fields == {"token": "<t>", "outcome": "never", "reason": ""}
    assert form.names == {*form.fields, "sure", "step", "go"}


@pytest.mark.parametrize("part", ("/nowhere", "/records?"))
def test_a_page_without_the_link_or_form_is_an_error_that_names_it(part: str) -> None:
    with pytest.raises(LookupError, match=r"/settle has no link to '/"):
        page().link(part)
    with pytest.raises(LookupError, match=r"/settle has no form for '/"):
        page().form(part)
