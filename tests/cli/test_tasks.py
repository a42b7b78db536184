"""`flask idempotency reap`, `expire`, `rotate` and `reconcile`: what they do, say, and exit with."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Flask

from flask_idempotency.cli import maintenance as cli_tasks
from flask_idempotency.engine.audit import MOST_SAID, AuditEntry
from flask_idempotency.engine.events import Reaped, RecordCorrupt, TaskRun
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.engine.tasks import LONGEST_LOCK_SECONDS
from flask_idempotency.maintenance.janitor import LOCK_SECONDS
from flask_idempotency.maintenance.rotate import GRACE_SECONDS
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql import schema
from flask_idempotency.testing import FaultyStore
from tests import apps
from tests.apps import World, new_world
from tests.books import book_of
from tests.cli.test_keys import NEW, OLD, disabled, run, shop

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
    """Sealed again at once; the old data keys go with a run five minutes later, and then nothing needs the old key."""
    world = shop({"old": OLD})
    world.post(key="a"), world.post(key="b")
    world = turned(world, BOTH)
    first = run(world, "rotate")

    assert (0, True) == (first.exit_code, "Sealed again: 2." in first.output)
    assert "Run it again after 5 minutes" in first.output
    assert "old  0        1          in use" in run(world, "keys", "status").output
    world.store.data_keys._shared._clock.advance(GRACE_SECONDS)  # type: ignore[attr-defined]
    second = object_of(run(world, "rotate", "--json"))
    assert (0, 1, True) == (second["resealed"], second["retired"], second["done"])
    assert "may go: nothing is sealed under it" in run(world, "keys", "status").output
    world = turned(world, {"new": NEW})
    assert ["paid", "paid"] == [world.post(key=key).text for key in ("a", "b")]
    assert 0 == len(world.told(RecordCorrupt))


def test_a_rotation_says_what_it_could_not_open() -> None:
    """Under a key that is not in the ring; and exits with 1, so that a cron job is heard."""
    world = shop({"old": OLD})
    world.post()
    result = run(turned(world, {"new": NEW}), "rotate")

    assert (1, True) == (result.exit_code, "Cannot be opened: 1." in result.output)


def test_a_ledger_that_nobody_touched_is_in_order() -> None:
    """And exits with 0."""
    world = shop(None, encryption="off", quota_records=5)
    world.post()
    result = run(world, "reconcile")

    assert (0, "Tenants: 1. Ledgers corrected: 0.\n") == (result.exit_code, result.output)


def test_records_that_were_deleted_by_hand_are_told_once(tmp_path: Path) -> None:
    """With exit code 1, and put right by it."""
    file = tmp_path / "records.db"
    world = shop(None, store=f"sqlite:///{file}", encryption="off", quota_records=5)

    def delete() -> None:
        with closing(sqlite3.connect(file)) as database, database:
            assert database.execute(f"DELETE FROM {schema.records.name}").rowcount == 1  # noqa: S608 - a constant

    assert run(world, "db", "upgrade").exit_code == 0
    world.post()
    delete()
    said = [run(world, "reconcile", "--json") for _ in range(2)]

    assert [1, 0] == [each.exit_code for each in said]
    assert [(1, 1), (0, 0)] == [(object_of(each)["drifted"], object_of(each)["records"]) for each in said]
    world.post(key="again")
    delete()
    assert "Wrong by 1 records" in run(world, "reconcile").output


def test_reap_quarantines_what_its_owner_has_left() -> None:
    """Once: the second time there is nothing to do. What is to be taken over is left to its retry."""
    world = apps.shop()
    apps.vanished(world, "a"), apps.vanished(world, "b", on_expiry=OnExpiry.TAKEOVER)
    early = object_of(run(world, "reap", "--json"))
    world.clock.advance(apps.LEASE + 1)
    said = [run(world, "reap", "--json") for _ in range(2)]

    assert [0, 0] == [each.exit_code for each in said]
    assert [(0, 0), (1, 1), (0, 1)] == [
        (told["quarantined"], told["waiting"]) for told in (early, *map(object_of, said))
    ]
    assert 1 == len(world.told(Reaped))
    assert "Their next retries take over: 1." in run(world, "reap").output


def test_reap_asks_resolvers_and_says_what_they_knew() -> None:
    """And exits with 1 when one of them failed, so that a cron job is heard."""
    world = apps.shop()
    answers = iter((Happened(("paid", 201)), ZeroDivisionError()))

    def resolver(unknown: UnknownOutcome) -> Resolution:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    world.idempotency.resolver("pay")(resolver)
    apps.lapsed(world, "a"), apps.lapsed(world, "b")
    told = run(world, "reap")

    assert 1 == told.exit_code
    assert (
        "Resolvers were called for 2 keys: 1 completed, 0 released, 0 resumed, 0 still unknown, 1 failed."
        in told.output
    )
    assert "The log says which resolver failed" in told.output


def test_show_says_what_a_resolver_answered_last() -> None:
    """Once, however often it answers the same. What it settles is a change, as ever."""
    world = apps.shop()
    answers: list[Resolution | Exception] = [StillUnknown(), StillUnknown(), TimeoutError("secret"), Happened("paid")]

    def resolver(unknown: UnknownOutcome) -> Resolution:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    world.idempotency.resolver("pay")(resolver)
    show = ("show", *apps.ALICES)
    apps.lapsed(world)
    assert "resolver" not in run(world, *show).output

    told = []
    for _ in range(3):
        world.clock.advance(3600)
        run(world, "reap")
        told.append(next(line for line in run(world, *show).output.splitlines() if line.startswith("unresolved")))
    assert [
        "the resolver says that it is still unknown, and is called again",
        "the resolver says that it is still unknown, and is called again",
        "the resolver failed (TimeoutError), and is called again; the janitor's log says how",
    ] == [line.partition(":")[2].strip() for line in told]
    assert "secret" not in "".join(told)
    entries = world.store.audit.entries(apps.key_of(world, "k"))
    assert ["says-still-unknown", "resolver-failed"] == [entry.verb for entry in entries]

    world.clock.advance(3600)
    run(world, "reap")
    assert "unresolved" not in run(world, *show).output
    assert "completed by resolver" in run(world, *show).output


def test_a_resolver_that_fails_now_and_then_hides_no_change() -> None:
    """It is asked each hour for weeks, and the trail shows its latest hundred entries."""
    world = apps.shop()
    answers: list[Resolution | None] = [None, StillUnknown()] * 55

    def resolver(unknown: UnknownOutcome) -> Resolution:
        answer = answers.pop(0)
        if answer is None:
            raise TimeoutError
        return answer

    world.idempotency.resolver("pay")(resolver)
    apps.lapsed(world)
    key = apps.key_of(world, "k")
    world.store.audit.append(key, AuditEntry("resumed", "quarantined", "ann", "asked the bank"), token=bytes(16))

    while answers:
        world.clock.advance(3600)
        run(world, "reap")

    verbs = [entry.verb for entry in world.store.audit.entries(key)]
    assert ["resumed", *["resolver-failed", "says-still-unknown"] * (MOST_SAID // 2)] == verbs


def test_reap_and_show_say_when_a_resolver_is_believed() -> None:
    """Its "never happened" is no "still unknown": the next retry runs soon, and no operator needs to look."""
    world = apps.shop()
    answers: list[Resolution] = [NeverHappened(), NeverHappened(), StillUnknown(), NeverHappened()]
    world.idempotency.resolver("pay")(lambda unknown: answers.pop(0))
    show = ("show", *apps.ALICES)
    apps.lapsed(world)
    assert "never happened" not in run(world, *show).output

    world.clock.advance(900 - 660 - 1)
    told, shown = run(world, "reap"), run(world, *show)
    assert "1 still unknown" in told.output
    assert "For 1 key, the resolver says it never happened; believed in 11 min" in told.output
    assert "the resolver says it never happened; believed in 11 min" in shown.output
    assert "changed" not in shown.output

    def asked(after: float) -> tuple[Any, Any]:
        world.clock.advance(after)
        reaped, seen = (object_of(run(world, *command, "--json")) for command in (("reap",), show))
        return (reaped["never_happened"], round(reaped["believed_in"])), seen["resolver"]

    never = {"verdict": "never-happened", "believed_in": 360.0, "error": None}
    assert ((1, 360), never) == asked(300)
    world.clock.advance(360)
    assert "the resolver says it never happened; believed at its next call" in run(world, *show).output
    # It has changed its mind.
    assert ((0, 0), {"verdict": "still-unknown", "believed_in": None, "error": None}) == asked(3600)
    world.clock.advance(3600)
    assert "1 released" in run(world, "reap").output


def test_expire_removes_what_is_over() -> None:
    """And nothing that is in progress or quarantined."""
    world = apps.shop()
    apps.paid(world, "a"), apps.paid(world, "b"), apps.vanished(world, "c")
    world.clock.advance(24 * 3600)
    told = run(world, "expire")

    assert (0, "Expired records removed, or reduced to a remembered key: 2.\n") == (told.exit_code, told.output)
    assert [None, None] == [apps.record(world, key) for key in "ab"]
    assert apps.record(world, "c") is not None


@pytest.mark.parametrize("task", ("reap", "expire", "rotate", "reconcile"))
def test_a_task_by_hand_is_written_down_and_told(task: str) -> None:
    """As a janitor's is: whoever relies on cron is not warned that none comes."""
    world = shop({"new": NEW}, quota_records=5)

    assert 0 == run(world, task).exit_code
    assert [task] == list(book_of(world.app).reports())
    assert [task] == [event.operation for event in world.told(TaskRun) if isinstance(event, TaskRun)]


@pytest.mark.parametrize("task", ("reap", "expire", "rotate", "reconcile"))
def test_a_task_that_somebody_is_at_is_left_to_them(task: str) -> None:
    """Which is in order: cron may come while the janitor is at work."""
    world = shop({"new": NEW}, quota_records=5)
    assert book_of(world.app).lock(task, b"another", lease=60)
    told = run(world, task)

    assert (0, True) == (told.exit_code, told.output.startswith("Another process runs this task"))
    assert {"busy": True} == object_of(run(world, task, "--json"))
    assert ({}, []) == (book_of(world.app).reports(), world.told(TaskRun))
    book_of(world.app).unlock(task, b"another")
    assert not object_of(run(world, task, "--json"))["busy"]


@pytest.mark.parametrize(("budget", "lease"), (((), 360.0), (("--budget", "7"), 67.0)), ids=("usual", "given"))
def test_a_task_that_is_killed_keeps_the_others_out_no_longer_than_its_budget(
    budget: tuple[str, ...], lease: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock ends a minute after it. One without an end would be no lock but a halt."""
    world, leases = apps.shop(), list[float]()
    take = type(world.store.task_log).lock

    def taken(self: Any, task: str, token: bytes, *, lease: float) -> bool:
        leases.append(lease)
        return take(self, task, token, lease=lease)

    monkeypatch.setattr(type(world.store.task_log), "lock", taken)

    assert (0, [lease]) == (run(world, "reap", *budget).exit_code, leases)


@pytest.mark.parametrize("task", ("reap", "expire", "rotate", "reconcile"))
def test_no_budget_is_longer_than_a_lock_may_last(task: str) -> None:
    """A longer one would be taken for another clock's, and the janitor would begin beside it."""
    world = shop({"new": NEW}, quota_records=5)

    longest, longer = (run(world, task, "--budget", budget) for budget in ("7000", "7001"))

    assert 7000 + LOCK_SECONDS < LONGEST_LOCK_SECONDS
    assert (0, 2) == (longest.exit_code, longer.exit_code), longest.output
    assert "7001" in longer.stderr


def test_a_task_whose_budget_ended_says_so() -> None:
    """It is no fault, and it is to be run again."""
    world = apps.shop()
    for number in range(3):
        apps.paid(world, str(number))
    world.clock.advance(24 * 3600)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cli_tasks,
            "with_budget",
            lambda drain, budget, on_progress: replace(drain, batch=1, budget=0.0, on_progress=on_progress),
        )
        told = [run(world, "expire"), run(world, "expire", "--json")]

    assert (0, True) == (told[0].exit_code, "Its budget ended before it was finished: run it again." in told[0].output)
    assert not object_of(told[1])["finished"]


@pytest.mark.parametrize(
    ("task", "why"),
    (
        ("reap", "cannot be searched for claims"),
        ("expire", "removes expired records by itself"),
        ("rotate", "set IDEMPOTENCY_ENCRYPTION to on"),
        ("reconcile", "does not count"),
    ),
)
def test_a_task_that_a_store_gives_no_work_for_is_refused(task: str, why: str) -> None:
    world = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]

    assert why in apps.refusal(run(world, task))
    assert "IDEMPOTENCY_ENABLED is False" in apps.refusal(run(disabled(), task))


def test_without_quotas_there_is_nothing_to_reconcile() -> None:
    assert "Quotas are off" in apps.refusal(run(apps.shop(), "reconcile"))
