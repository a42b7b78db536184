"""docs/guides/client.md: its functions, called against a service that loses a reply."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.generate import HERE
from flask_idempotency.client import ClientError
from tests.client.scripted import Drop, Line, ScriptedServer, problem, reply, scripted
from tests.docs.test_pages import BLOCK, run_block, surroundings

PAGE = (HERE / "guides" / "client.md").read_text(encoding="utf-8")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as server:
        yield server


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    names = surroundings()
    for block in BLOCK.findall(PAGE):
        run_block(PAGE, block, names)
    return names


def test_a_named_payment_survives_a_lost_reply_and_a_second_run(server: ScriptedServer, names: dict[str, Any]) -> None:
    server.script = [Drop(), reply(), reply(201, b"{}", "Idempotency-Replayed: true")]

    first, intent = names["pay_invoice"](server.url, 17, {"amount": 5})
    again, intent_again = names["pay_invoice"](server.url, 17, {"amount": 5})

    assert (first.status_code, again.status_code) == (201, 201)
    assert (intent.replayed, intent_again.replayed) == (False, True)
    assert len(set(server.keys)) == 1


def test_the_example_says_what_to_do(server: ScriptedServer, names: dict[str, Any]) -> None:
    cases: list[tuple[list[Line], str]] = [
        ([reply()], "answered with 201"),
        ([reply(402)], "answered with 402"),
        ([Drop(), reply(402)], "perhaps paid, answered with 402"),
        ([problem("invalid-key", 400)], "not paid"),
        ([problem("outcome-unknown", 409)], "perhaps paid"),
        ([problem("response-erased", 410)], "paid before"),
    ]
    for number, (script, said) in enumerate(cases):
        server.script = script
        assert names["pay_or_explain"](server.url, number, {"amount": 5}).startswith(said), said


def test_the_table_names_each_exception_that_is_raised() -> None:
    def leaves(kind: type[ClientError]) -> Iterator[str]:
        for child in kind.__subclasses__():
            yield from leaves(child) if child.__subclasses__() else [child.__name__]

    rows = re.findall(r"^\| (`[A-Z][^|]*)\|", PAGE, re.MULTILINE)
    assert sorted(name.strip(" `") for row in rows for name in row.split(",")) == sorted(leaves(ClientError))


def test_the_session_of_the_page_sends_the_key_to_each_scheme(server: ScriptedServer, names: dict[str, Any]) -> None:
    with names["intents"]("pay") as intent:
        names["session"].post(server.url, json={}, timeout=60)

    assert server.keys == [intent.key]


def test_what_settles_a_charge(server: ScriptedServer, names: dict[str, Any]) -> None:
    stripe = names["stripe"]
    client = stripe.StripeClient("sk_test_x", base_addresses={"api": server.url}, max_network_retries=0)
    cases = [
        (402, b"card_error", stripe.CardError, "refused"),
        (400, b"invalid_request_error", stripe.InvalidRequestError, "refused"),
        (400, b"idempotency_error", stripe.IdempotencyError, "sent"),
        (401, b"invalid_request_error", stripe.AuthenticationError, "sent"),
        (500, b"api_error", stripe.APIError, "sent"),
    ]
    for number, (status, kind, error, state) in enumerate(cases):
        server.script = [reply(status, b'{"error": {"type": "%s", "message": "no"}}' % kind)]
        with pytest.raises(error):
            names["charge"](client, number, {"amount": 5, "currency": "eur"})
        assert names["intents"].ledger.find(f"charge {number}").state == state, error


def test_a_client_that_sends_its_own_key(server: ScriptedServer, names: dict[str, Any]) -> None:
    stripe = names["stripe"]
    client = stripe.StripeClient("sk_test_x", base_addresses={"api": server.url}, max_network_retries=0)
    declined = b'{"error": {"type": "card_error", "code": "card_declined", "message": "declined"}}'
    server.script = [reply(402, declined), reply(200, b'{"id": "ch_1", "object": "charge"}')]

    with pytest.raises(stripe.CardError):
        names["charge"](client, 17, {"amount": 5, "currency": "eur"})
    names["charge"](client, 17, {"amount": 5, "currency": "eur"})

    first, second = server.keys
    assert None not in (first, second)
    assert first != second
    assert names["intents"].ledger.find("charge 17").state == "done"
