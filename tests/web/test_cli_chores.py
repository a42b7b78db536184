"""`flask idempotency rotate` and `reconcile`: what they do, say, and exit with."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from flask import Flask

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import RecordCorrupt
from flask_idempotency.maintenance.rotate import GRACE_SECONDS
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.web.apps import FaultyMemory, World, new_world
from tests.web.test_cli_keys import NEW, OLD, disabled, run, shop

BOTH = {"new": NEW, "old": OLD}


def turned(world: World, ring: Any, **settings: Any) -> World:
    """The same shop after a restart with this ring."""
    again = new_world(Flask("tests.web.app"), store=world.store, encryption="on", key_ring=ring, **settings)
    again.view()(lambda: "paid again")
    return again


def object_of(result: Result) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def test_after_a_rotation_the_old_key_may_go() -> None:
    """
    Sealed anew at once; the old data keys go with a run five minutes later, and then nothing needs the old key.
    """
    world = shop({"old": OLD})
    world.post(key="a"), world.post(key="b")
    world = turned(world, BOTH)
    first = run(world, "rotate")

    assert (0, True) == (first.exit_code, "Sealed anew: 2." in first.output)
    assert "Run it once more after 5 minutes" in first.output
    assert "old  0        1          in use" in run(world, "keys", "status").output
    world.store.data_keys._room._clock.advance(GRACE_SECONDS)  # type: ignore[attr-defined]
    second = object_of(run(world, "rotate", "--json"))
    assert (0, 1, True) == (second["resealed"], second["retired"], second["done"])
    assert "may go: nothing is sealed under it" in run(world, "keys", "status").output
    world = turned(world, {"new": NEW})
    assert ["paid", "paid"] == [world.post(key=key).text for key in ("a", "b")]
    assert 0 == len(world.told(RecordCorrupt))


def test_a_rotation_says_what_it_could_not_open() -> None:
    """
    Under a key that is not in the ring; and exits with 1, so that a cron job is heard.
    """
    world = shop({"old": OLD})
    world.post()
    result = run(turned(world, {"new": NEW}), "rotate")

    assert (1, True) == (result.exit_code, "Cannot be opened: 1." in result.output)


def test_a_rotation_that_makes_no_sense_is_refused() -> None:
    """
    Each with its remedy.
    """
    plain = shop(None, encryption="off")
    said = run(plain, "rotate")
    assert (1, True) == (said.exit_code, "set IDEMPOTENCY_ENCRYPTION to on" in said.output)
    assert 1 == run(disabled(), "rotate", "--json").exit_code


def test_a_ledger_that_nobody_touched_is_in_order() -> None:
    """
    And exits with 0.
    """
    world = shop(None, encryption="off", quota_records=5)
    world.post()
    result = run(world, "reconcile")

    assert (0, "Tenants: 1. Ledgers that were wrong, and are right now: 0.\n") == (result.exit_code, result.output)


def test_records_that_were_deleted_by_hand_are_told_once() -> None:
    """
    With exit code 1, and put right by it.
    """
    world = shop(None, encryption="off", quota_records=5)
    world.post()
    world.store.ledger._room.records.clear()
    said = [run(world, "reconcile", "--json") for _ in range(2)]

    assert [1, 0] == [each.exit_code for each in said]
    assert [(1, 1), (0, 0)] == [(object_of(each)["drifted"], object_of(each)["records"]) for each in said]
    world.post(key="again")
    world.store.ledger._room.records.clear()
    assert "Wrong by 1 records" in run(world, "reconcile").output


def test_a_store_that_cannot_do_it_is_said_to_be_so() -> None:
    """
    Not every store counts.
    """
    world = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]
    result = run(world, "reconcile")

    assert (1, True) == (result.exit_code, "does not count" in result.output)


def test_a_store_that_does_not_answer_is_not_said_to_be_in_order() -> None:
    """
    Exit code 2: nobody can tell.
    """
    world = shop(None, encryption="off", quota_records=5)

    class Silent(FaultyMemory):
        """Its ledger is not to be had."""

        def __init__(self) -> None:
            super().__init__(MemoryStore())
            self.ledger.tenants = self.refuse  # type: ignore[method-assign]

        def refuse(self) -> Any:
            raise StoreUnavailable("down")

    world = shop(None, store=Silent(), encryption="off", quota_records=5)
    assert 2 == run(world, "reconcile").exit_code
