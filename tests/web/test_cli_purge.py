"""`flask idempotency purge`: the answers of one tenant become unreadable, and nothing runs again."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from typing import Any

import pytest
from click.testing import Result
from flask import Flask, request

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.key import Identity
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.web.apps import World, new_world

RING = {"a": b64encode(b"a" * 32).decode()}
SHRED = ("--tenant", "acme", "--shred", "--yes")


def shop(*, store: Any = None, encryption: str = "on", **settings: Any) -> World:
    world = new_world(Flask("tests.web.app"), store=store, init=False, encryption=encryption, key_ring=RING, **settings)
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> str:
        world.runs.append(request.headers.get("X-Tenant"))
        return "paid"

    for tenant in ("acme", "globex"):
        assert 200 == paid(world, tenant)
    return world


def paid(world: World, tenant: str = "acme") -> int:
    return world.post(headers={"X-Tenant": tenant}).status_code


def run(world: World, *arguments: str, answer: str | None = None) -> Result:
    return world.app.test_cli_runner().invoke(args=["idempotency", "purge", *arguments], input=answer)


def test_a_shredded_tenants_retries_are_410_and_nobody_elses() -> None:
    """
    And none of them runs again.
    """
    world = shop()

    told = run(world, *SHRED)

    assert (0, True) == (told.exit_code, told.output.startswith("Data keys destroyed: 1. Every stored answer"))
    assert [410, 200] == [paid(world, tenant) for tenant in ("acme", "globex")]
    assert ["acme", "globex"] == world.runs


def test_it_tells_that_records_stay_and_what_of_backups() -> None:
    """
    What is not said here is believed to be gone.
    """
    said = run(shop(), *SHRED).output

    assert "Its records stay" in said
    assert "Backups made before hold the same data keys" in said


def test_it_asks_first() -> None:
    """
    No, and no answer at all, leave everything as it is.
    """
    world = shop()
    arguments = SHRED[:-1]

    assert [1, 1] == [run(world, *arguments, answer=answer).exit_code for answer in ("n\n", "")]
    assert 200 == paid(world)
    assert 0 == run(world, *arguments, answer="y\n").exit_code
    assert 410 == paid(world)


def test_machines_get_one_object_and_repeating_it_is_harmless() -> None:
    world = shop()

    told = [run(world, *SHRED, "--json") for _ in range(2)]

    assert [(0, {"data_keys": 1}), (0, {"data_keys": 0})] == [
        (each.exit_code, json.loads(each.stdout)) for each in told
    ]
    assert 410 == paid(world)


def test_during_a_rotation_of_the_secret_the_tenant_is_shredded_under_every_one() -> None:
    """
    Else the older releases would go on replaying.
    """
    before = shop()
    world = shop(store=before.store, secret=["new", "s"])

    assert 0 == run(world, *SHRED).exit_code

    assert [410, 410] == [paid(each) for each in (world, before)]


@pytest.mark.parametrize(
    ("world", "remedy"),
    (
        pytest.param(lambda: shop(encryption="off"), "set IDEMPOTENCY_ENCRYPTION to on", id="off"),
        pytest.param(
            lambda: shop(store=FaultyStore(MemoryStore()), encryption="off"), "set IDEMPOTENCY_ENCRYPTION", id="store"
        ),
    ),
)
def test_where_nothing_is_encrypted_it_is_refused_with_a_remedy(world: Any, remedy: str) -> None:
    """
    Without asking, and without having done anything.
    """
    shopped = world()

    told = run(shopped, *SHRED[:-1])

    assert (1, "", True) == (told.exit_code, told.stdout, remedy in told.stderr)
    assert 200 == paid(shopped)


@pytest.mark.parametrize(
    "arguments",
    (("--tenant", "acme", "--yes"), ("--shred", "--yes"), ("--tenant", "", "--shred", "--yes")),
    ids=" ".join,
)
def test_what_is_not_said_whole_is_not_done(arguments: tuple[str, ...]) -> None:
    """
    Neither of whom, nor how.
    """
    world = shop()

    assert 2 == run(world, *arguments).exit_code
    assert 200 == paid(world)


def test_a_store_that_is_down_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Nobody can tell whether the keys are gone, so it is to be repeated.
    """
    world = shop()

    def down(*_: Any) -> int:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(type(world.store.data_keys), "destroy", down)

    assert (2, "Error: no answer\n") == ((told := run(world, *SHRED)).exit_code, told.stderr)


def test_it_is_told_to_the_log_and_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    run(shop(), *SHRED)

    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "purged"]
    assert (logging.WARNING, 1) == (record.levelno, record.data_keys)  # type: ignore[attr-defined]
    assert Identity(b"s").pseudonym("acme") == record.tenant  # type: ignore[attr-defined]
    assert "acme" not in str(vars(record))
