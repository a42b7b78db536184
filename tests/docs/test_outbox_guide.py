"""The application of the outbox guide writes a payment and its messages once, and its Celery route sends what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from docs.generate import HERE
from flask_idempotency.engine.outbox import Message
from tests.docs.test_pages import BLOCK, surroundings

PAGE = (HERE / "guides" / "outbox.md").read_text(encoding="utf-8")


class Collected:
    """An adapter in place of the brokers of the page."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, messages: Sequence[Message]) -> list[None]:
        self.messages += messages
        return [None] * len(messages)


def run(block: str, **names: Any) -> dict[str, Any]:
    names = {**surroundings(), **names}
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    return names


def test_the_payment_of_the_page_and_its_messages_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    names = run(next(block for block in BLOCK.findall(PAGE) if "Kafka({" in block), __name__="shop")
    app, collected = names["app"], Collected()
    app.testing = True
    routes = names["outbox"]._routes
    for pattern in list(routes):
        del routes[pattern]
        names["outbox"].route(pattern, collected)
    with app.app_context():
        names["db"].create_all()

    answers = [
        app.test_client().post("/payments", json={"amount": 5}, headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    services = app.extensions["idempotency_outbox"]
    while services.relay().run_once():
        pass

    assert [201, 201] == [answer.status_code for answer in answers]
    assert ["payments", "shop.tasks.receipt"] == [message.topic for message in collected.messages]
    assert [{"id": 1}, {"payment_id": 1}] == [message.json() for message in collected.messages]
    services.table.close()
    with app.app_context():
        names["db"].session.remove()
        names["db"].engine.dispose()


def test_the_adapter_of_the_page_refuses_what_it_can_never_send(capsys: pytest.CaptureFixture[str]) -> None:
    mail = run(next(block for block in BLOCK.findall(PAGE) if "class Mail" in block))["Mail"]()
    headers = {"content-type": "application/json"}
    messages = [
        Message(f"m-{to}", "mail.x", b'{"to":"%s"}' % to.encode(), headers=headers) for to in ("a@b", "nowhere")
    ]

    assert [type(None).__name__, "Undeliverable"] == [type(result).__name__ for result in mail.send(messages)]
    assert "to a@b" in capsys.readouterr().out


def test_the_blocks_of_the_page_fit_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    names: dict[str, Any] = {"__name__": "shop"}
    for block in BLOCK.findall(PAGE):
        exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page

    assert {"pay", "charge_and_publish"} <= set(names["app"].view_functions)
    assert {"payments", "mail.*", "charges"} <= set(names["outbox"]._routes)
    names["app"].extensions["idempotency_outbox"].table.close()
