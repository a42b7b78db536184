"""`flask idempotency stats`: how many records there are, and whether anybody looks after them."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import LEASE, lapsed, new_world, paid, refusal, run, said, shop, vanished
from tests.books import book_of


def test_it_counts_what_there_is_in_each_state() -> None:
    """And says for how long the oldest have waited."""
    world = shop(quota_records=100)
    lapsed(world, "a", after=LEASE + 90)
    vanished(world, "b")
    world.clock.advance(LEASE + 61)
    vanished(world, "c")
    paid(world, "d"), paid(world, "e")

    assert [
        "in flight: 1",
        "lease expired: 1, the oldest for 1 min 1 s",
        "quarantined: 1, the oldest for 3 min 1 s",
        "completed: 2",
        "data keys: 0",
        "tenants with a ledger: 1",
        "No janitor task has ever reported: start a janitor, or run its tasks by cron.",
    ] == run(world, "stats").output.splitlines()


def test_machines_get_numbers() -> None:
    world = shop()
    paid(world)

    assert {
        "standing": {
            "in_flight": 0,
            "lapsed": 0,
            "quarantined": 0,
            "lapsed_for": None,
            "quarantined_for": None,
        },
        "completed": 1,
        "data_keys": 0,
        "tenants": 0,
        "tasks": {},
        "identity": [],
        "health": None,
        "paused": 0,
    } == said(run(world, "stats", "--json"))


def test_quickly_it_does_not_count_what_may_be_millions(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shop()
    monkeypatch.setattr(type(world.store.responses), "count", _never)

    assert "completed: not counted" in run(world, "stats", "--quick").output
    assert said(run(world, "stats", "--quick", "--json"))["completed"] is None


def _never(*_: Any) -> Any:
    raise AssertionError("counted")


def test_it_says_when_each_task_was_last_done_and_what_it_did() -> None:
    """What another release has written, and cannot be read, was done all the same."""
    world = shop()
    vanished(world)
    world.clock.advance(LEASE + 1)
    assert 0 == run(world, "reap").exit_code
    book_of(world.app).report("expire", '{"removed":0,"shrunk":0,"finished":false,"seconds":1.5}')
    book_of(world.app).report("sweep", "\x1b[2J")
    world.clock.advance(75)

    assert [
        "expire: 1 min 15 s ago: not finished",
        "reap: 1 min 15 s ago: quarantined 1",
        "sweep: 1 min 15 s ago",
    ] == run(world, "stats").output.splitlines()[6:]
    tasks = said(run(world, "stats", "--json"))["tasks"]
    assert (75.0, 1) == (tasks["reap"]["ago"], tasks["reap"]["did"]["quarantined"])
    assert {"ago": 75.0, "did": {}} == tasks["sweep"]


def test_a_store_that_cannot_tell_is_said_to_be_so() -> None:
    world = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]

    assert "cannot be searched" in refusal(run(world, "stats"))


def test_what_a_store_cannot_tell_is_not_known() -> None:
    """And not 0."""

    class Poor(FaultyStore):
        """It can be searched, and no more."""

        def __init__(self) -> None:
            store = MemoryStore()
            super().__init__(store)
            self.recovery = store.recovery

    world = new_world(Flask("tests.web.app"), store=Poor())  # type: ignore[arg-type]
    told = run(world, "stats").output

    assert all(f"{what}: not known" in told for what in ("completed", "data keys", "tenants with a ledger"))
    assert "it cannot tell whether a janitor runs" in told
