"""The payment provider's page: a charge is made once, and its resolver settles a charge whose outcome was unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask, abort
from flask.testing import FlaskClient

from docs.generate import HERE
from flask_idempotency import (
    Happened,
    Idempotency,
    StillUnknown,
    StoreUnavailable,
    UnknownOutcome,
    current_claim,
    idempotent,
)
from tests.apps import new_world
from tests.docs.test_pages import BLOCK, surroundings

PAGE = (HERE / "guides" / "external-effects.md").read_text(encoding="utf-8")


class Provider:
    """Makes one charge for each key."""

    def __init__(
        self, *, fails_before: bool = False, fails_after: bool = False, cancels: bool = False, settled: bool = True
    ) -> None:
        self.charges: dict[str, dict[str, Any]] = {}
        self.fails_before, self.fails_after, self.cancels = fails_before, fails_after, cancels
        self.settled = settled

    def charge(self, payment: dict[str, Any], key: str) -> dict[str, Any]:
        if self.fails_before:
            raise ConnectionError("the request was lost")
        charge = self.charges.setdefault(key, {**payment, "settled": self.settled})
        if self.fails_after:
            raise ConnectionError("the reply was lost")
        return charge

    def find_charge(self, key: str) -> dict[str, Any] | None:
        return self.charges.get(key)

    def cancel(self, key: str) -> bool:
        return self.cancels


def application(provider: Provider) -> FlaskClient:
    names = surroundings()
    app: Flask = names["app"]
    app.testing = True
    app.config["PROPAGATE_EXCEPTIONS"] = False
    names |= {"provider": provider, "charge": provider.charge}
    (block,) = (block for block in BLOCK.findall(PAGE) if "def what_became_of_it" in block)
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    idempotency: Idempotency = names["idempotency"]
    idempotency.init_app(app)
    return app.test_client()


def pay(client: FlaskClient) -> tuple[int, bool]:
    response = client.post("/charges", json={"amount": 5}, headers={"Idempotency-Key": "k"})
    return response.status_code, "Idempotency-Replayed" in response.headers


def reap(client: FlaskClient) -> None:
    assert 0 == client.application.test_cli_runner().invoke(args=["idempotency", "reap"]).exit_code


def test_a_charge_is_made_once() -> None:
    provider = Provider()
    client = application(provider)

    assert [(201, False), (201, True)] == [pay(client) for _ in range(2)]
    assert 1 == len(provider.charges)


@pytest.mark.parametrize(
    ("provider", "settled", "charges"),
    (
        (Provider(fails_after=True), (201, True), 1),
        (Provider(fails_after=True, settled=False, cancels=True), (409, False), 1),
        (Provider(fails_before=True, cancels=True), (402, True), 0),
        (Provider(fails_before=True), (409, False), 0),
    ),
    ids=("made", "on its way", "ruled out", "unknown"),
)
def test_a_failure_past_the_point_waits_for_the_resolver(
    provider: Provider, settled: tuple[int, bool], charges: int
) -> None:
    """The resolver frees no key: a provider that refuses this one refuses the retry too."""
    client = application(provider)

    assert [(500, False), (409, False)] == [pay(client) for _ in range(2)]
    reap(client)

    assert settled == pay(client)
    assert charges == len(provider.charges)


class Killed(SystemExit):
    """Ends the worker, as a signal of its server does."""


class Ledger:
    """Makes one charge for each key. Then the worker may die, or a second janitor may run."""

    def __init__(self, *, dies: bool = False, janitor: Callable[[], object] | None = None) -> None:
        self.charges: dict[str, dict[str, Any]] = {}
        self.dies, self.janitor = dies, janitor

    def create_charge(self, key: str, amount: int, metadata: dict[str, str]) -> dict[str, Any]:
        charge = self.charges.setdefault(key, {"amount": amount, "metadata": metadata, "settled": True})
        if self.dies:
            raise Killed
        return charge

    def find_charge(self, key: str) -> dict[str, Any] | None:
        if self.janitor is not None:
            first, self.janitor = self.janitor, None
            first()
        return self.charges.get(key)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The names of the page's module, with its tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    names = surroundings()
    (block,) = (block for block in BLOCK.findall(PAGE) if "def record_payment" in block)
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    names["app"].config["PROPAGATE_EXCEPTIONS"] = False
    with names["app"].app_context():
        names["db"].create_all()
        yield names
        names["db"].engine.dispose()


def buy(shop: dict[str, Any]) -> tuple[int, bool]:
    order = {"order": "A-17", "amount": 5}
    response = shop["app"].test_client().post("/payments", json=order, headers={"Idempotency-Key": "k"})
    return response.status_code, "Idempotency-Replayed" in response.headers


def rows(shop: dict[str, Any]) -> list[tuple[str, str, int]]:
    payment, session = shop["Payment"], shop["db"].session
    session.rollback()
    return [tuple(row) for row in session.query(payment.downstream, payment.order, payment.amount)]


def test_a_charge_and_its_row_are_made_once(shop: dict[str, Any]) -> None:
    shop["provider"] = ledger = Ledger()

    assert [(201, False), (201, True)] == [buy(shop) for _ in range(2)]
    assert [(key, "A-17", 5) for key in ledger.charges] == rows(shop)


def test_the_resolver_writes_the_row_of_a_worker_that_died_after_the_charge(shop: dict[str, Any]) -> None:
    shop["provider"] = ledger = Ledger(dies=True)

    with pytest.raises(Killed):
        buy(shop)
    ledger.dies = False
    assert ((409, False), [], 1) == (buy(shop), rows(shop), len(ledger.charges))
    reap(shop["app"].test_client())

    assert [(201, True), (201, True)] == [buy(shop) for _ in range(2)]
    assert [(key, "A-17", 5) for key in ledger.charges] == rows(shop)
    assert 1 == len(ledger.charges)


def test_two_resolvers_and_a_late_worker_write_one_row(shop: dict[str, Any]) -> None:
    """The second resolver runs between the lookup and the write of the first."""
    shop["provider"] = ledger = Ledger()
    charge = ledger.create_charge("d", 5, {"order": "A-17"})
    unknown = UnknownOutcome(SimpleNamespace(), lambda name: "d")  # type: ignore[arg-type]

    def other_janitor() -> None:
        with shop["app"].app_context():
            shop["repair"](unknown)

    ledger.janitor = other_janitor
    with shop["app"].app_context():
        first = shop["repair"](unknown)
    with shop["app"].app_context():
        late = shop["record_payment"]("d", charge)

    assert first == Happened(late)
    assert [("d", "A-17", 5)] == rows(shop)


def test_a_charge_that_is_not_settled_gets_no_row(shop: dict[str, Any]) -> None:
    shop["provider"] = ledger = Ledger()
    ledger.create_charge("d", 5, {"order": "A-17"})["settled"] = False

    assert StillUnknown() == shop["repair"](UnknownOutcome(SimpleNamespace(), lambda name: "d"))  # type: ignore[arg-type]
    assert [] == rows(shop)


@pytest.mark.parametrize(("caught", "status"), ((False, 500), (True, 503)))
def test_a_point_that_the_store_cannot_mark_releases_the_key(
    monkeypatch: pytest.MonkeyPatch, caught: bool, status: int
) -> None:
    world = new_world()

    def silent(*arguments: object) -> None:
        raise StoreUnavailable("no reply")

    @world.view()
    @idempotent(effects="marked")
    def pay() -> str:
        try:
            current_claim.point_of_no_return()
        except StoreUnavailable:
            if caught:
                abort(503)
            raise
        world.runs.append("paid")
        return "paid"

    monkeypatch.setattr(type(world.store), "mark_point_of_no_return", silent)

    assert f"write `except StoreUnavailable: abort({503})`" in PAGE
    assert (status, ["release"], []) == (world.post().status_code, world.settled(), world.runs)
