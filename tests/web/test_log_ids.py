"""What a person has in hand who reads a log: the eight characters that stand for a record there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.engine.keys import Identity
from flask_idempotency.operations import records
from flask_idempotency.operations.records import Refused, by_short, handle_of
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import a_key, stand
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers
from tests.web.apps import World
from tests.web.cases import WHY, paid, refusal, run, said, world_on

SECRETS = ("new", "old")


@pytest.fixture(params=("memory", "sqlite", REDIS_KINDS[0]))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    database = f"sqlite:///{tmp_path / 'records.db'}"
    if request.param == "memory":
        return None
    if request.param == "sqlite":
        return database
    servers: RedisServers = request.getfixturevalue("redis_servers")
    return servers.get(REDIS_KINDS[0]).url


def logged(world: World) -> str:
    """What the log line of the last event has as its record."""
    return next(event.record for event in reversed(world.events) if event.record)


@pytest.mark.parametrize("secret", (("s",), SECRETS), ids=("one secret", "while secrets are rotated"))
def test_an_id_from_a_log_is_shown_and_released(store: Any, secret: Any) -> None:
    """Of a key that is quarantined, among others; in capitals too. Then it is found no more."""
    world = world_on(store, secret=secret)
    assert 201 == paid(world, "done").status_code
    assert 500 == paid(world, Fail="yes").status_code
    label = logged(world)
    shown = said(run(world, "show", label.upper(), "--json"))

    assert (label, "quarantined", "pay") == (shown["record"], shown["state"], shown["endpoint"])
    assert 0 == run(world, "release", label, *WHY, "--yes", "--force").exit_code
    assert "no record with this id" in refusal(run(world, "show", label))
    assert 201 == paid(world).status_code


def test_an_id_from_a_log_is_resolved(store: Any) -> None:
    world = world_on(store)
    assert 500 == paid(world, Fail="yes").status_code
    done = run(world, "resolve", logged(world), "--happened", "--status", "201", "--yes", *WHY)

    assert (0, 201) == (done.exit_code, paid(world).status_code)
    assert 1 == len(world.runs)


def test_a_completed_record_is_shown_by_its_id(store: Any) -> None:
    world = world_on(store)
    assert 201 == paid(world).status_code
    label = logged(world)

    assert "completed" == said(run(world, "show", label, "--tenant", "acme", "--json"))["state"]
    assert "no record with this id" in refusal(run(world, "show", label, "--tenant", "globex"))


def test_the_beginning_of_a_handle_is_enough(store: Any) -> None:
    world = world_on(store)
    assert 500 == paid(world, Fail="yes").status_code
    (line,) = said(run(world, "list", "--state", "quarantined", "--json"))["records"]

    for length in (8, 40, 76, 77):
        assert line["handle"] == said(run(world, "show", line["handle"][:length], "--json"))["handle"]
    assert 2 == run(world, "show").exit_code
    assert 1 == run(world, "show", line["handle"][:7]).exit_code


def test_an_id_of_several_records_is_refused_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is settled by luck. Also where one of them is completed."""
    clock = FrozenClock()
    store = MemoryStore(clock=clock)
    keys = a_key(), a_key()
    stand(store, clock, keys[0], "quarantined")
    stand(store, clock, keys[1], "completed")
    monkeypatch.setattr(Identity, "_label", lambda self, rid: "abcd1234")

    with pytest.raises(Refused, match="2 records have this id") as raised:
        by_short(store.recovery, [Identity(b"s")], "abcd1234", tids=[None])
    assert all(handle_of(key) in str(raised.value) for key in keys)


def test_what_would_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is found may not be the only one."""
    clock = FrozenClock()
    store = MemoryStore(clock=clock)
    key = a_key()
    stand(store, clock, key, "quarantined")
    for _ in range(3):
        stand(store, clock, a_key(), "completed")
    label = Identity(b"s").label(key)
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 3)
    assert handle_of(key) == by_short(store.recovery, [Identity(b"s")], label, tids=[None])
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 2)

    with pytest.raises(Refused, match="too many to look for"):
        by_short(store.recovery, [Identity(b"s")], label, tids=[None])


def test_what_was_typed_is_never_repeated() -> None:
    """It may be a client's key."""
    world = world_on(None)

    assert "order4711" not in run(world, "show", "order4711").output
