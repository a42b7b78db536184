"""The commands that settle keys, on stores that other processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency.engine.errors import NotApplied
from flask_idempotency.engine.events import Resolved
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.operations.records import handle_of
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import found
from tests.apps import ALICES, LEASE, MAX_RUNTIME, WHY, World, lapsed, paid, refusal, run, said, shop, world_on
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers


@pytest.fixture(params=("sqlite", "tiered", *REDIS_KINDS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    database = f"sqlite:///{tmp_path / 'records.db'}"
    if request.param == "sqlite":
        return world_on(database)
    servers: RedisServers = request.getfixturevalue("redis_servers")
    url = servers.get(REDIS_KINDS[0] if request.param == "tiered" else request.param).url
    return world_on(database, redis_url=url) if request.param == "tiered" else world_on(url, namespace=str(tmp_path))


def quarantined(world: World) -> list[dict[str, Any]]:
    told = run(world, "list", "--state", "quarantined", "--tenant", "acme", "--json")
    records: list[dict[str, Any]] = said(told)["records"]
    return records


def test_what_a_list_shows_can_be_shown_and_released(world: World) -> None:
    """By its handle. Its next retry runs, and then it is released no more."""
    assert 500 == paid(world, Fail="yes").status_code
    (line,) = quarantined(world)
    shown = said(run(world, "show", line["handle"], "--json"))

    assert ("pay", "acme", "alice", "status-500") == tuple(
        shown[n] for n in ("endpoint", "tenant", "principal", "reason")
    )
    assert 0 == run(world, "release", line["handle"], *WHY, "--yes", "--force").exit_code
    assert ([], 201) == (quarantined(world), paid(world).status_code)
    assert "Its request completed" in refusal(run(world, "release", line["handle"], *WHY, "--yes"))
    assert 1 == len(world.told(Resolved))


def test_what_is_resolved_is_every_retrys_answer(world: World) -> None:
    """Byte for byte, and the view does not run."""
    assert 500 == paid(world, Fail="yes").status_code
    happened = ("--happened", "--status", "202", "--body-file", "-", *WHY, "--yes")

    assert 0 == run(world, "resolve", *ALICES, *happened, typed=b"\x00done").exit_code
    assert (202, b"\x00done") == ((answer := paid(world)).status_code, answer.data)
    assert ([], 1) == (quarantined(world), len(world.runs))


def test_a_purge_leaves_nothing_readable_and_nothing_runs_again(world: World) -> None:
    assert 201 == paid(world).status_code

    assert 1 == said(run(world, "purge", "--tenant", "acme", *WHY, "--yes", "--json"))["wiped"]
    assert (410, 1) == (paid(world).status_code, len(world.runs))
    state = world.app.extensions["idempotency"]
    tid = Identity(b"s").tenant_id(state.settings.namespace, "acme")
    assert {b""} == {payload.data for payload in _payloads(state.built.responses, tid)}


@pytest.mark.parametrize("condemned", (False, True), ids=("answered", "condemned"))
def test_a_host_that_does_not_know_the_cache_leaves_its_answers_alone(
    tmp_path: Path, redis_servers: RedisServers, condemned: bool
) -> None:
    """
    It could free the key in the database, and the web hosts would go on replaying. Where the cache is known it is freed.
    """
    database, cache = f"sqlite:///{tmp_path / 'records.db'}", redis_servers.get(REDIS_KINDS[0]).url
    web, admin = world_on(database, redis_url=cache), world_on(database)
    assert [201, 201, 500] == [paid(web).status_code, paid(web).status_code, paid(web, "other", Fail="yes").status_code]
    commands = [("release", *ALICES, *WHY, "--yes"), ("release", *ALICES, *WHY, "--yes", "--force")]
    if condemned:
        built = web.app.extensions["idempotency"].built
        (answer,) = built.recovery.scan(State.COMPLETED, limit=10).found
        store = SqlStore(Database(database))
        payload = found(store, answer.key).payload
        assert payload is not None
        store.mark_corrupt(answer.key, payload)
        store.close()
        happened = ("--happened", "--status", "202")
        commands += [
            ("resolve", *ALICES, verdict, *rest, *WHY, "--yes")
            for verdict, *rest in (happened, ("--reopen",), ("--never-happened", "--force"))
        ]
    before = admin.app.extensions["idempotency"].built.recovery.counts().quarantined

    for command in commands:
        told = refusal(run(admin, *command))
        assert "IDEMPOTENCY_REDIS_URL is not set here" in told
        assert "Nothing was changed." in told
    assert before == admin.app.extensions["idempotency"].built.recovery.counts().quarantined
    other = ("--key", "other", *ALICES[2:])
    assert 0 == run(admin, "release", *other, *WHY, "--yes", "--force").exit_code
    assert 0 == run(web, *commands[1]).exit_code
    answer = paid(web)
    assert (201, None) == (answer.status_code, answer.headers.get("Idempotency-Replayed"))


def test_where_no_host_has_ever_had_a_cache_an_answer_can_be_released(tmp_path: Path) -> None:
    """Most databases stand alone."""
    world = world_on(f"sqlite:///{tmp_path / 'records.db'}")
    assert 201 == paid(world).status_code

    assert 0 == run(world, "release", *ALICES, *WHY, "--yes", "--force").exit_code


def _payloads(answers: Any, tid: bytes) -> Iterator[Any]:
    after: bytes | None = b""
    while after is not None:
        page = answers.scan(after=after, limit=100, tid=tid)
        yield from (answer.record.payload for answer in page.answers)
        after = page.after


def test_tasks_by_hand_are_written_down_for_every_process(world: World) -> None:
    assert 0 == run(world, "reap").exit_code

    assert "reap" in said(run(world, "stats", "--json"))["tasks"]


def test_switched_off_an_application_on_its_own_database_can_still_be_looked_after(tmp_path: Path) -> None:
    """It may be switched off because of what its keys are in: then somebody has to see to them."""

    def app(*, enabled: bool) -> World:
        made = Flask("tests.web.app")
        made.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'records.db'}"
        SQLAlchemy(made)
        return world_on("flask-sqlalchemy://", app=made, enabled=enabled)

    on = app(enabled=True)
    assert 500 == paid(on, Fail="yes").status_code
    off = app(enabled=False)
    (line,) = quarantined(off)

    assert line["handle"] == said(run(off, "show", *ALICES, "--json"))["handle"]
    assert 0 == run(off, "release", line["handle"], *WHY, "--yes", "--force").exit_code
    assert 0 == run(off, "policy").exit_code
    assert 201 == paid(on).status_code


def test_a_janitor_that_does_not_know_the_cache_settles_nothing_that_holds_an_answer(
    tmp_path: Path, redis_servers: RedisServers
) -> None:
    """Whatever a resolver says of it there would be two answers: the cache's, and its own."""
    database, cache = f"sqlite:///{tmp_path / 'records.db'}", redis_servers.get(REDIS_KINDS[0]).url
    web, janitor = world_on(database, redis_url=cache), world_on(database)
    assert 201 == paid(web).status_code
    unsettled = janitor.app.extensions["idempotency"].built.recovery
    (answer,) = unsettled.scan(State.COMPLETED, limit=10).found

    with pytest.raises(NotApplied, match="IDEMPOTENCY_REDIS_URL"):
        unsettled.force_release(answer)
    assert "true" == paid(web).headers["Idempotency-Replayed"]
    assert web.app.extensions["idempotency"].built.recovery.force_release(answer)


def test_another_applications_key_is_settled_by_that_one_alone() -> None:
    """Its policies, its ring and its resolvers are not known here."""
    world = shop()
    key, _ = lapsed(world, after=LEASE + MAX_RUNTIME)
    another = Flask("another")
    Idempotency(another, store=world.store, secret="another's-9f2c47d1e8b35a60")
    handle = handle_of(key)

    told = another.test_cli_runner().invoke(args=["idempotency", "release", handle, *WHY, "--yes", "--force"])
    assert (1, True) == (told.exit_code, "belongs to another application" in told.stderr)
    assert State.QUARANTINED is found(world.store, key).state
    assert 0 == run(world, "release", handle, *WHY, "--yes").exit_code
