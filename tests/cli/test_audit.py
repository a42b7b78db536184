"""`show` prints who changed a record and why, and `purge` removes that with the tenant."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.testing.contract.support import a_key, a_token
from tests.apps import ALICES, WHY, World, key_of, paid, run, said, shop, vanished

LATER = 100_000.0
"""Seconds after which no worker can run any more."""


def settled(**settings: Any) -> World:
    """A key of Alice that was quarantined and completed by an operator."""
    world = shop(on_error="quarantine", **settings)
    paid(world, Fail="yes")
    world.clock.advance(LATER)
    told = run(world, "resolve", *ALICES, *WHY, "--yes", "--happened", "--status", "201")
    assert 0 == told.exit_code, told.output
    return world


def test_show_prints_who_changed_the_record_and_why() -> None:
    world = settled()

    text = run(world, "show", *ALICES).output
    (change,) = said(run(world, "show", *ALICES, "--json"))["changes"]

    (line,) = [line for line in text.splitlines() if line.startswith("changed:")]
    assert f"{change['at']}: completed by ops, while quarantined: {WHY[1]}" in line
    assert {
        "at": change["at"],
        "verb": "completed",
        "step": None,
        "was": "quarantined",
        "actor": "ops",
        "reason": WHY[1],
        "forced": False,
        "certain": True,
    } == change


def test_a_record_that_no_operator_changed_shows_no_change() -> None:
    world = shop()
    paid(world)

    assert "changed:" not in run(world, "show", *ALICES).output
    assert [] == said(run(world, "show", *ALICES, "--json"))["changes"]


def test_a_forced_release_shows_in_the_next_life_of_the_key() -> None:
    """The trail outlives the record."""
    world = shop()
    vanished(world)
    assert 0 == run(world, "release", *ALICES, *WHY, "--yes", "--force").exit_code
    assert 201 == paid(world).status_code

    assert ", by force, while processing: " in run(world, "show", *ALICES).output
    assert [("released", True)] == [
        (each["verb"], each["forced"]) for each in said(run(world, "show", *ALICES, "--json"))["changes"]
    ]


def test_a_store_without_a_trail_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null, and not an empty list, tells a machine that nothing is known."""
    world = settled()
    state = world.app.extensions["idempotency"]
    without = replace(state, built=replace(state.built, audit=None))
    monkeypatch.setitem(world.app.extensions, "idempotency", without)

    assert said(run(world, "show", *ALICES, "--json"))["changes"] is None
    assert "changed:" not in run(world, "show", *ALICES).output


@pytest.mark.parametrize("how", ((), ("--shred",)), ids=("wiped", "shredded"))
def test_a_purge_removes_the_trail_of_the_tenant(how: tuple[str, ...]) -> None:
    """And of no other tenant."""
    ring = {"a": b64encode(b"a" * 32).decode()}
    world = settled(encryption="on", key_ring=ring)
    services = world.app.extensions["idempotency"].built
    other = a_key()
    services.audit.append(other, AuditEntry("completed", "quarantined", "ops", "why"), token=a_token())
    assert 1 == len(services.audit.entries(key_of(world)))

    told = run(world, "purge", "--tenant", "acme", *how, *WHY, "--yes")

    assert 0 == told.exit_code, told.output
    assert [0, 1] == [len(services.audit.entries(key)) for key in (key_of(world), other)]


def test_a_purge_whose_trail_may_be_left_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code for unknown outcomes. Repeating it is safe."""
    world = settled()
    services = world.app.extensions["idempotency"].built
    forget = services.audit.forget

    def away(tid: bytes) -> None:
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(services.audit, "forget", away)
    assert 2 == run(world, "purge", "--tenant", "acme", *WHY, "--yes").exit_code
    monkeypatch.setattr(services.audit, "forget", forget)
    assert 0 == run(world, "purge", "--tenant", "acme", *WHY, "--yes").exit_code
    assert [] == list(services.audit.entries(key_of(world)))
