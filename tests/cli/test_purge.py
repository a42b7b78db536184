"""`flask idempotency purge`: the answers of one tenant become unreadable, and nothing runs again."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Flask, request

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import TenantErased
from flask_idempotency.engine.keys import Identity
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import World, new_world

RING = {"a": b64encode(b"a" * 32).decode()}
WHY = ("--reason", "their contract has ended", "--actor", "ops")
SHRED = ("--tenant", "acme", "--shred", *WHY, "--yes")


def shop(*, store: Any = None, encryption: str = "on", **settings: Any) -> World:
    world = new_world(
        store=store, encryption=encryption, key_ring=RING, tenant=lambda: request.headers.get("X-Tenant"), **settings
    )

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
    """And none of them runs again."""
    world = shop()

    told = run(world, *SHRED)

    assert (0, True) == (told.exit_code, told.output.startswith("Data keys destroyed: 1.\nEvery encrypted response"))
    assert [410, 200] == [paid(world, tenant) for tenant in ("acme", "globex")]
    assert ["acme", "globex"] == world.runs


def test_it_tells_that_records_stay_and_what_of_backups() -> None:
    """What is not said here is believed to be gone."""
    said = run(shop(), *SHRED).output

    assert "Its records stay" in said
    assert "No retry gets a plain response either. Plain responses stay readable" in said
    assert "Backups made before hold the same data keys" in said


def test_it_asks_first() -> None:
    """No, and no answer at all, leave everything as it is."""
    world = shop()
    arguments = SHRED[:-1]

    assert [1, 1] == [run(world, *arguments, answer=answer).exit_code for answer in ("n\n", "")]
    assert 200 == paid(world)
    assert 0 == run(world, *arguments, answer="y\n").exit_code
    assert 410 == paid(world)


def test_machines_get_one_object_and_repeating_it_is_harmless() -> None:
    world = shop()

    told = [run(world, *SHRED, "--json") for _ in range(2)]

    rest = {"secrets": 1, "cache_unknown": False}
    assert [(0, {"data_keys": 1, **rest}), (0, {"data_keys": 0, **rest})] == [
        (each.exit_code, json.loads(each.stdout)) for each in told
    ]
    assert 410 == paid(world)


def test_during_a_rotation_of_the_secret_the_tenant_is_shredded_under_every_one() -> None:
    """Else the older releases would go on replaying."""
    before = shop()
    world = shop(store=before.store, secret=["new", "s"])

    assert 0 == run(world, *SHRED).exit_code

    assert [410, 410] == [paid(each) for each in (world, before)]


def test_it_tells_under_which_secrets_it_looked() -> None:
    """
    Under one that is no longer listed the tenant has data keys of its own, and what they sealed is still replayed.
    """
    before = shop(secret=["old"])
    world = shop(store=before.store, secret=["new"])

    told = run(world, *SHRED)

    assert "Secrets searched: 1. Keys that were claimed under another secret have other data keys" in told.output
    assert [410, 200] == [paid(each) for each in (world, before)]
    whole = new_world(Flask("tests.web.app"), store=before.store, encryption="on", key_ring=RING, secret=["new", "old"])
    assert "Secrets searched: 2." in run(whole, *SHRED).output
    assert 410 == paid(before)


def test_the_help_says_where_to_run_it() -> None:
    said = " ".join(run(shop(), "--help").output.split())

    assert "every secret is listed that was in use within the last `keep`" in said
    assert "has IDEMPOTENCY_REDIS_URL, run it where that is set" in said


def test_it_tells_that_a_cache_which_is_not_known_here_was_not_told(tmp_path: Path) -> None:
    """
    An administrator's host may have the database only, which knows. Where there is no cache, nothing is said of one.
    """
    world = new_world(
        Flask("tests.web.app"),
        store=f"sqlite:///{tmp_path / 'records.db'}",  # type: ignore[arg-type]
        encryption="on",
        key_ring=RING,
    )
    assert 0 == world.app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code

    assert not json.loads(run(world, *SHRED, "--json").stdout)["cache_unknown"]
    world.app.extensions["idempotency"].built.cache_marker.note_cache()

    assert "IDEMPOTENCY_REDIS_URL is not set here, so no cache was invalidated" in run(world, *SHRED).output
    assert json.loads(run(world, *SHRED, "--json").stdout)["cache_unknown"]
    assert "IDEMPOTENCY_REDIS_URL" not in run(shop(), *SHRED).output


def test_where_nobody_can_tell_whether_there_is_a_cache_it_says_so(tmp_path: Path) -> None:
    """The database knows, and does not answer any more: the answers are erased all the same."""

    class Silent:
        def has_cache(self) -> bool:
            raise StoreUnavailable("gone")

    world = new_world(Flask("tests.web.app"), store=f"sqlite:///{tmp_path / 'records.db'}")  # type: ignore[arg-type]
    assert 0 == world.app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code
    state = world.app.extensions["idempotency"]
    world.app.extensions["idempotency"] = replace(state, built=replace(state.built, cache_marker=Silent()))

    assert json.loads(run(world, "--tenant", "acme", *WHY, "--yes", "--json").stdout)["cache_unknown"]


@pytest.mark.parametrize("ring", (RING, None), ids=("with a ring", "without its ring"))
def test_what_was_sealed_is_shredded_after_encryption_was_switched_off(ring: Any) -> None:
    """The data keys are still there, whatever the settings say of what is stored from now on."""
    before = shop()
    world = switched_off(before, key_ring=ring)

    told = [run(world, *SHRED) for _ in range(2)]

    assert [(0, True), (0, True)] == [(each.exit_code, "destroyed" in each.output) for each in told]
    assert [410, 410] == [paid(each) for each in (world, before)]


def switched_off(before: World, **settings: Any) -> World:
    """The same shop, which encrypts no more."""
    world = new_world(store=before.store, encryption="off", tenant=lambda: request.headers.get("X-Tenant"), **settings)
    world.view()(lambda: "paid again")
    return world


def test_where_nothing_was_ever_encrypted_it_is_refused_with_a_remedy() -> None:
    """Without asking, and without having done anything."""
    world = switched_off(shop(encryption="off"))

    told = run(world, *SHRED[:-1])

    assert (1, "", True) == (told.exit_code, told.stdout, "set IDEMPOTENCY_ENCRYPTION to on" in told.stderr)
    assert 200 == paid(world)


def test_a_store_that_keeps_no_data_keys_is_refused() -> None:
    world = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]

    told = run(world, *SHRED)

    assert (1, True) == (told.exit_code, "keeps no data keys" in told.stderr)


@pytest.mark.parametrize(
    "arguments",
    (
        ("--shred", *WHY),
        ("--tenant", "", "--shred", *WHY),
        ("--tenant", "acme", "--shred"),
        ("--tenant", "acme", "--reason", " "),
    ),
    ids=("of whom", "an empty name", "why", "an empty reason"),
)
def test_what_is_not_said_whole_is_not_done(arguments: tuple[str, ...]) -> None:
    """Neither of whom, nor why."""
    world = shop()

    assert 2 == run(world, *arguments, "--yes").exit_code
    assert 200 == paid(world)


def test_a_cache_that_did_not_hear_is_exit_code_2_and_the_remedy_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are gone by then, under every secret: the first that fails must not keep the others."""
    before = shop()
    world = shop(store=before.store, secret=["new", "s"])
    destroy = type(world.store.data_keys).shred

    def unheard(self: Any, tid: bytes) -> int:
        destroy(self, tid)
        raise StoreUnavailable("The data keys are destroyed, and the cache did not hear of it: repeat this.")

    with monkeypatch.context() as patched:
        patched.setattr(type(world.store.data_keys), "shred", unheard)
        told = run(world, *SHRED)

    assert 2 == told.exit_code
    assert "Error: The data keys are destroyed, and the cache did not hear of it: repeat this.\n" == told.stderr
    (event,) = world.told(TenantErased)
    assert isinstance(event, TenantErased)
    assert (False, True) == (event.finished, "acme" not in str(event))
    assert [410, 410] == [paid(each) for each in (world, before)]
    assert 0 == run(world, *SHRED).exit_code


def test_it_is_told_as_an_audit_event_and_names_nobody() -> None:
    """Who, why, and of whom by what stands for them."""
    world = shop()

    run(world, *SHRED)

    pseudonym = Identity(b"s").pseudonym("acme")
    why = "their contract has ended"
    assert [
        TenantErased("", "", tenant=pseudonym, actor="ops", reason=why, data_keys=1, wiped=0, finished=True)
    ] == world.told(TenantErased)
