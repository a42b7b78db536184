"""`flask idempotency redis …`: making a Redis ready, and what people do about one that has forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result
from flask import Flask, request

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import DataLossAcknowledged, StoreInitialised
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.data_loss import RedisDataLoss
from flask_idempotency.web.doctor import run_checks
from tests.apps import WHY, World, new_world, refusal, said
from tests.apps import run as run_any
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, StartRedis, connect, is_written
from tests.tooling.processes import eventually

SOON = 0.001
"""Seconds that nobody has to wait for: over before the next command is."""
ALL = layout.PARTITIONS


def world_on(store: Any, **settings: Any) -> World:
    settings = {"after_loss": "refuse", "data_loss_grace": 60, "on_error": "quarantine", **settings}
    world = new_world(Flask("tests.web.app"), store=store, **settings)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    return world


def run(world: World, *arguments: str, typed: str | None = None) -> Result:
    return run_any(world, "redis", *arguments, typed=typed)


def paid(world: World, key: str = "k") -> int:
    return world.post(key=key).status_code


@pytest.fixture
def server(redis_servers: RedisServers) -> RedisServer:
    return redis_servers.get(REDIS_KINDS[0])


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


@pytest.fixture
def world(server: RedisServer) -> World:
    """On a Redis that was made ready."""
    world = world_on(server.url, data_loss_grace=SOON)
    assert 0 == run(world, "init").exit_code
    world.events.clear()
    return world


def test_a_new_redis_runs_nothing_until_it_is_made_ready(server: RedisServer) -> None:
    """What is to be done is said by the refusal's log, by `status`, and done by `init`."""
    world = world_on(server.url)
    before = run(world, "status")
    assert (503, 1, True) == (paid(world), before.exit_code, "flask idempotency redis init" in before.stdout)

    assert 0 == run(world, "init", *WHY).exit_code
    assert (201, 0) == (paid(world), run(world, "status").exit_code)
    assert [("ops", "asked the bank")] == [
        (told.actor, told.reason) for told in world.told(StoreInitialised) if isinstance(told, StoreInitialised)
    ]


def test_init_says_by_which_name_another_redis_would_be_refused(server: RedisServer) -> None:
    """Once it is set there is nothing more to say."""
    world = world_on(server.url)
    told = run(world, "init")
    store_id = said(run(world, "status", "--json"))["store_id"]
    assert (f"IDEMPOTENCY_STORE_ID={store_id} " in told.stdout, len(store_id)) == (True, 16)

    named = world_on(server.url, store_id=store_id)

    assert [store_id in (again := run(named, "init").stdout), "IDEMPOTENCY_STORE_ID" in again] == [True, False]


def test_a_name_that_is_set_is_the_name_that_it_gets(server: RedisServer) -> None:
    world = world_on(server.url, store_id="shop-production")

    assert {"store_id": "shop-production", "new": True, "named": True} == said(run(world, "init", "--new", "--json"))


def test_an_empty_redis_gets_the_id_in_the_settings_when_a_person_confirms(server: RedisServer) -> None:
    """It may have had that id before it was emptied. One that is ready needs no confirmation."""
    world = world_on(server.url, store_id="shop-production")
    for typed in (None, "n\n"):
        no = run(world, "init", typed=typed)
        assert (1, "", True) == (no.exit_code, no.stdout, "second time" in no.stderr and "redis ack" in no.stderr)
    assert (503, []) == (paid(world), world.told(StoreInitialised))

    assert [0, 0] == [run(world, "init", typed="y\n").exit_code, run(world, "init").exit_code]
    assert 201 == paid(world)


@pytest.mark.parametrize("kind", REDIS_KINDS)
@pytest.mark.parametrize("settings", ({}, {"store_id": "shop-production"}), ids=("any", "named"))
def test_init_refuses_a_redis_that_a_worker_saw_emptied(
    redis_servers: RedisServers, kind: str, settings: dict[str, Any]
) -> None:
    """The command is a process of its own, which has never seen this Redis."""
    server = redis_servers.get(kind)
    worker = world_on(server.url, data_loss_grace=SOON, **settings)
    assert (0, 201) == (run(worker, "init", "--new").exit_code, paid(worker))
    with connect(server.url) as client:
        client.flushall()
    assert 503 == paid(worker, "new")
    operator = world_on(server.url, data_loss_grace=SOON, **settings)

    no = refusal(run(operator, "init", "--new"))
    assert ("redis ack --reason" in no, "second time" in no) == (True, True)
    assert "redis init" not in run(operator, "status").stdout
    assert (503, []) == (paid(worker), operator.told(StoreInitialised))

    assert 0 == run(operator, "ack", *WHY, "--yes").exit_code
    assert (201, 0) == (paid(worker, "new"), run(operator, "init").exit_code)


def test_init_of_one_that_is_ready_changes_and_tells_nothing(world: World) -> None:
    first = said(run(world, "status", "--json"))

    again = said(run(world, "init", "--json"))

    assert (first["store_id"], False) == (again["store_id"], again["new"])
    assert [] == world.told(StoreInitialised)


def test_one_with_claims_in_it_is_not_new(world: World, client: redis.Redis) -> None:
    """Owners that survive put theirs back: where some are, it was emptied."""
    assert 500 == world.post(headers={"X-Fail": "yes"}).status_code
    client.delete(*map(layout.facts_in, range(ALL)))

    assert "not new" in refusal(run(world, "init"))
    assert {"missing": ALL} == said_status(world)["losses"]


def said_status(world: World) -> Any:
    """What `status` tells machines, however the store stands."""
    told = run(world, "status", "--json")
    assert told.exit_code in (0, 1), told.output
    return said(told)


def test_an_emptied_redis_is_acknowledged_by_a_person(world: World, client: redis.Redis) -> None:
    """Who is shown what it is about, and can say no."""
    assert 201 == paid(world)
    client.flushall()
    told = run(world, "status")
    assert (503, 1, True) == (paid(world), told.exit_code, f"{ALL} missing" in told.stdout)

    no = run(world, "ack", *WHY, typed="n\n")
    assert (1, True, 503) == (no.exit_code, f"{ALL} missing" in no.stderr, paid(world, "new"))
    assert [] == world.told(DataLossAcknowledged)

    assert 0 == run(world, "ack", *WHY, typed="y\n").exit_code
    assert (201, 0) == (paid(world, "new"), run(world, "status").exit_code)
    assert [
        DataLossAcknowledged(
            "", "", actor="ops", reason="asked the bank", forced=False, parts={"missing": ALL}, finished=True
        )
    ] == world.told(DataLossAcknowledged)


def test_survivors_are_waited_for_unless_somebody_insists(server: RedisServer, client: redis.Redis) -> None:
    world = world_on(server.url)
    run(world, "init")
    client.flushall()
    status = said_status(world)
    assert 0 < status["seconds_until_ack"] <= 60

    assert "left to restore their claims" in refusal(run(world, "ack", *WHY, "--yes"))
    assert ([], 503) == (world.told(DataLossAcknowledged), paid(world))

    assert {"missing": ALL} == said(run(world, "ack", *WHY, "--yes", "--force", "--json"))["acknowledged"]
    assert (201, [True]) == (
        paid(world),
        [told.forced for told in world.told(DataLossAcknowledged) if isinstance(told, DataLossAcknowledged)],
    )


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_after_a_restart_old_answers_are_given_and_new_keys_wait_for_somebody(
    start_redis: StartRedis, kind: str
) -> None:
    """On each server: as every restart that may have lost something, though here nothing was lost."""
    server = start_redis(kind, "--appendonly", "yes", "--appendfsync", "everysec")
    world = world_on(server.url, data_loss_grace=SOON)
    run(world, "init")
    assert 201 == paid(world)
    with connect(server.url) as client:
        assert eventually(lambda: is_written(client))
    server.kill()
    server.restart()

    assert [201, 503] == [paid(world), paid(world, "new")]
    told = run(world, "status")
    assert (1, True, True) == (told.exit_code, f"{ALL} changed" in told.stdout, "redis ack" in told.stdout)
    assert "run a second time" in told.stdout
    assert 0 == run(world, "ack", *WHY, "--yes").exit_code
    assert ([201, 201], 2) == ([paid(world), paid(world, "new")], len(world.runs))


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_after_a_restart_that_loses_nothing_new_keys_run(start_redis: StartRedis, kind: str) -> None:
    """With the processes that were there, and with those that come after it."""
    server = start_redis(kind, "--appendonly", "yes", "--appendfsync", "always")
    world = world_on(server.url)
    run(world, "init")
    assert 201 == paid(world)
    server.kill()
    server.restart()
    assert [201, 201] == [paid(world), paid(world, "new")]
    server.restart()
    later = world_on(server.url)

    assert 0 == run(later, "status").exit_code
    assert [201, 201, 201] == [paid(later), paid(later, "new"), paid(later, "newer")]
    assert (2, 1) == (len(world.runs), len(later.runs))


def test_another_environments_redis_cannot_be_taken_over(world: World, server: RedisServer) -> None:
    """Neither made ready nor acknowledged, whoever insists; and nothing of it is changed."""
    theirs = said_status(world)
    stranger = world_on(server.url, store_id="another")
    told = run(stranger, "status")

    assert (1, True) == (told.exit_code, f"{theirs['store_id']}, and IDEMPOTENCY_STORE_ID names another" in told.stdout)
    assert "right Redis" in refusal(run(stranger, "ack", *WHY, "--yes", "--force"))
    assert "right Redis" in refusal(run(stranger, "init"))
    assert (503, 201) == (paid(stranger), paid(world))
    assert theirs["parts"] == said_status(world)["parts"]


def test_where_nothing_is_lost_nothing_is_acknowledged(world: World) -> None:
    """Nobody is asked, and nothing is told."""
    told = run(world, "ack", *WHY)

    assert (0, True, []) == (told.exit_code, "nothing to acknowledge" in told.stdout, world.told(DataLossAcknowledged))


COMMANDS = (("init",), ("status",), ("ack", *WHY, "--yes"))


@pytest.mark.parametrize("kind", ("memory", "tiered"))
def test_records_that_are_not_in_redis_need_none_of_this(
    kind: str, tmp_path: Path, redis_servers: RedisServers
) -> None:
    """A Redis that is a cache may forget."""
    if kind == "memory":
        world = new_world()
    else:
        url = redis_servers.get(REDIS_KINDS[0]).url
        world = new_world(store=f"sqlite:///{tmp_path / 'records.db'}", redis_url=url)  # type: ignore[arg-type]

    assert all("not in a Redis" in refusal(run(world, *command)) for command in COMMANDS)


def test_a_redis_that_is_down_cannot_be_asked() -> None:
    """The application starts all the same, and no operator has acknowledged anything."""
    world = world_on("redis://127.0.0.1:1")

    for command in COMMANDS:
        told = run(world, *command)

        assert (2, True) == (told.exit_code, told.stderr.startswith("Error: Redis cannot decide")), command
    assert [] == world.events


def test_an_acknowledgement_that_breaks_off_is_told_as_one_that_may_have_been(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(self: RedisDataLoss, **how: object) -> None:
        raise StoreUnavailable("gone in the middle")

    client.flushall()
    assert 1 == run(world, "status").exit_code
    monkeypatch.setattr(RedisDataLoss, "acknowledge", break_off)

    assert 2 == run(world, "ack", *WHY, "--yes").exit_code
    assert [False] == [
        told.finished for told in world.told(DataLossAcknowledged) if isinstance(told, DataLossAcknowledged)
    ]


def test_a_redis_that_has_forgotten_can_still_be_looked_into(world: World, client: redis.Redis) -> None:
    """Every command that finds out what happened works; doctor says that all is not well."""
    client.flushall()

    assert [0, 0] == [run_any(world, *each).exit_code for each in (("stats",), ("list", "--state", "quarantined"))]
    assert 1 == run_any(world, "doctor").exit_code
    with world.app.app_context():
        found = {each.check: each for each in run_checks(world.app, environ={}).findings}
    assert (Verdict.FAULT, Verdict.ADVICE) == (found["canary"].verdict, found["after-loss"].verdict)


def told_at_start(caplog: pytest.LogCaptureFixture, url: str, **settings: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="flask_idempotency"):
        world_on(url, **settings)
    return [record.getMessage() for record in caplog.records]


def test_an_application_that_starts_on_one_says_so_in_one_line(
    world: World, server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The gravest, whatever else is wrong; and nothing where all is well, or where forgetting is allowed."""
    assert [] == told_at_start(caplog, server.url)
    client.delete(layout.facts_in(7))
    client.hset(layout.facts_in(8), mapping={"process": "0" * 40, "replication_id": "0" * 40})
    (missing,) = told_at_start(caplog, server.url)
    (foreign,) = told_at_start(caplog, server.url, store_id="another")

    assert ("is empty" in missing, "another id" in foreign) == (True, True)
    assert [] == told_at_start(caplog, server.url, after_loss="run")


def test_what_cannot_be_read_at_start_keeps_nobody_from_starting(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client.set(layout.facts_in(7), "not ours")

    assert ["Cannot check Redis for data loss (ResponseError: WRONGTYPE)"] == told_at_start(caplog, server.url)
