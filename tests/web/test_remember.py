"""`remember`: after `keep`, a retry is refused and does not run, until the key is forgotten."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from flask import Flask, jsonify, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.engine import events
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import ERASED, Record, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.maintenance.janitor import Batcher, ExpireReport
from flask_idempotency.operations.records import AuditNote
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.web.janitor import janitor_of
from flask_idempotency.web.purge import Purge
from tests.apps import KEY, FaultyMemory, World, new_world
from tests.backends import BACKENDS
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["maria_database", "sql_databases", "sql_stores"]

KEEP, REMEMBER, STATUS = 3600.0, 86400.0, "/idempotency/status"
STORES = ("memory", "sqlite", "fakeredis", "tiered-fakeredis")


@pytest.fixture(params=STORES)
def on_store(request: pytest.FixtureRequest) -> Any:
    """Make the shop of `shop` on a store of this kind."""
    with ExitStack() as ends:

        def make(**settings: Any) -> World:
            clock = FrozenClock()
            store = BACKENDS[request.param](request, ends)(clock)
            world = shop(store=cast("FaultyMemory", store), **settings)
            world.clock = clock
            return world

        yield make


def shop(**settings: Any) -> World:
    world = new_world(**{"keep": KEEP, "remember": REMEMBER, "status_url": STATUS, **settings})

    @world.view("/payments")
    def pay() -> Any:
        world.runs.append(request.get_data(as_text=True))
        return jsonify(paid=len(world.runs)), 201

    return world


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """A key of this test alone: a database is shared."""
    key = secrets.token_hex(8)
    monkeypatch.setattr(World, "key", key, raising=False)
    return key


def send(world: World, body: str = "10", **headers: str) -> TestResponse:
    key = cast("Any", world).key
    return world.post("/payments", key=key, data=body, content_type="text/plain", headers=headers)


def pay(world: World, body: str = "10", **headers: str) -> tuple[int, str | None]:
    response = send(world, body, **headers)
    return response.status_code, (response.get_json() or {}).get("code")


def test_a_late_retry_is_refused_and_does_not_run(on_store: Any) -> None:
    """Until the key is forgotten. Another request under it is still another, and another caller has a key of its own."""
    world = on_store()
    first = world.clock.now
    assert [(201, None), (201, None)] == [pay(world), pay(world)]
    world.clock.advance(KEEP + 1)

    response = send(world)
    seen = datetime.fromtimestamp(int(first), UTC)
    assert (410, "key-expired") == (response.status_code, response.get_json()["code"])
    assert response.get_json()["detail"].endswith(f"It was first seen at {seen:%Y-%m-%dT%H:%M:%SZ}.")
    assert "Retry-After" not in response.headers
    assert (422, "key-reused") == pay(world, "20")
    assert (201, None) == pay(world, **{"X-User": "bob"})
    assert (["10", "10"], 1) == (world.runs, len(world.told(events.ExpiredRefused)))
    world.clock.advance(REMEMBER - KEEP - 2)
    assert (410, "key-expired") == pay(world)
    world.clock.advance(2)
    assert ((201, None), 3) == (pay(world), len(world.runs))


def test_the_janitor_takes_the_response_and_leaves_the_key(on_store: Any) -> None:
    world = on_store()
    pay(world)
    world.clock.advance(KEEP + 1)
    janitor = janitor_of(world.app, host_clock=world.clock)
    report = cast("ExpireReport", janitor.run("expire", Batcher(sleep=lambda seconds: None)))

    assert (report.removed > 0, report.finished) == (True, True)
    assert (410, "key-expired") == pay(world)
    world.clock.advance(REMEMBER)
    assert (201, None) == pay(world)


def test_the_status_of_the_key_is_expired(on_store: Any, key: str) -> None:
    """It says that the request was done and with which status, and shows no response."""
    world = on_store()
    pay(world)
    world.clock.advance(KEEP + 1)
    told = world.client().get(f"{STATUS}?method=POST&path=/payments", headers={KEY: key})

    document = told.get_json()
    assert (200, "expired", 201, 1) == (told.status_code, document["state"], document["status"], document["attempt"])
    assert "seconds_left" not in document


def test_a_remembered_key_is_not_voided(on_store: Any, key: str) -> None:
    world = on_store(void=True)
    pay(world)
    world.clock.advance(KEEP + 1)
    told = world.client().delete(f"{STATUS}?method=POST&path=/payments", headers={KEY: key})

    assert (200, "expired") == (told.status_code, told.get_json()["state"])
    assert (410, "key-expired") == pay(world)


def test_a_shorter_remember_later_changes_no_record(on_store: Any) -> None:
    """How long a key is known stands in its record. So does that of a key from before the setting."""
    world = on_store()
    pay(world)
    world.clock.advance(KEEP + 1)
    later = shop(store=world.store, remember=None, keep=KEEP)
    later.clock = world.clock

    assert (410, "key-expired") == pay(later)


@pytest.mark.parametrize("remember", [timedelta(minutes=59), 91 * 86400, 0])
def test_a_remember_that_cannot_hold_is_refused_at_start(remember: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"remember|REMEMBER"):
        shop(remember=remember)


def test_a_store_that_forgets_is_refused_at_start() -> None:
    """With the remedy. Without `remember`, it is never given the argument."""
    store = FaultyMemory(MemoryStore(clock=FrozenClock()))
    store.remembers = None
    with pytest.raises(ConfigurationError, match=r"no `remembers`.*or leave `remember` out"):
        shop(store=store)

    world = shop(store=store, remember=None)
    assert (201, None) == pay(world)


def test_a_view_may_remember_for_longer_than_the_application() -> None:
    world = new_world(keep=KEEP)

    @world.view("/refunds")
    @idempotent(remember=REMEMBER)
    def refund() -> str:
        world.runs.append("refund")
        return "refunded"

    first = world.post("/refunds")
    world.clock.advance(KEEP + 1)
    assert (200, 410, 1) == (first.status_code, world.post("/refunds").status_code, len(world.runs))


def test_a_tombstone_and_a_plain_error_are_remembered_too(on_store: Any) -> None:
    """The request has run, with or without a stored body."""
    world = on_store(max_body=4)
    pay(world)
    assert (201, "response-not-kept") == pay(world)
    world.clock.advance(KEEP + 1)

    assert (410, "key-expired") == pay(world)


def test_a_request_with_steps_is_remembered(on_store: Any) -> None:
    """Its journal goes with its completion, and no step runs again."""
    world: World = on_store(steps=("charge",))

    @world.view("/charges")
    def charge() -> Any:
        return jsonify(charged=current_claim.step("charge", lambda: world.runs.append("charge")))

    key = cast("Any", world).key
    assert 200 == world.post("/charges", key=key).status_code
    world.clock.advance(KEEP + 1)
    janitor_of(world.app, host_clock=world.clock).run("expire", Batcher(sleep=lambda seconds: None))

    assert (410, ["charge"]) == (world.post("/charges", key=key).status_code, world.runs)
    assert not world.store.journals.read(world.store.recovery.scan(State.COMPLETED, limit=1000).found[0].key).entries


def test_a_transactional_record_is_remembered(tmp_path: Path) -> None:
    """It is completed in the application's transaction, with both times."""
    app = Flask("tests.web.remember")
    app.config.update(TESTING=True, SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    db = SQLAlchemy(app)
    rows = db.Table("payments", db.Column("id", db.Integer, primary_key=True))
    settings: dict[str, Any] = {"store": "flask-sqlalchemy://", "secret": "s", "keep": KEEP, "remember": REMEMBER}
    Idempotency(app, effects="transactional", **settings)
    store = app.extensions["idempotency"].built.engine._deps.store

    @app.post("/payments")
    def pay() -> str:
        db.session.execute(rows.insert())
        return "paid"

    with app.app_context():
        db.create_all()
        store.schema.upgrade()
    answers = [app.test_client().post("/payments", headers={KEY: "k"}) for _ in range(2)]
    with app.app_context():
        (found,) = store.recovery.scan(State.COMPLETED, limit=10).found
        paid = db.session.execute(db.select(db.func.count()).select_from(rows)).scalar_one()

    assert ([200, 200], 1) == ([each.status_code for each in answers], paid)
    assert REMEMBER - KEEP == pytest.approx(found.record.remembered_until - found.record.deadline, abs=0.002)


def test_the_longest_life_of_a_policy_counts_both() -> None:
    assert (KEEP, REMEMBER) == (Policy(keep=KEEP).lifetime, Policy(keep=KEEP, remember=REMEMBER).lifetime)


def completed(world: World) -> dict[Any, Record]:
    return {each.key: each.record for each in world.store.recovery.scan(State.COMPLETED, limit=1000).found}


@pytest.mark.parametrize("happens", ("corrupt", "expired"))
def test_a_purge_wipes_each_response_and_the_key_stays_known(
    on_store: Any, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    """A corrupt one too, and one that the janitor has not wiped yet. The request does not run again after `keep`."""
    world = on_store()
    before = completed(world)
    pay(world)
    (key,) = completed(world).keys() - before.keys()
    if happens == "corrupt":
        world.store.mark_corrupt(key, world.store.read(key).payload)
    else:
        world.clock.advance(KEEP + 1)
        monkeypatch.setattr(time, "time", lambda: world.clock.now)
    with world.app.app_context():
        Purge("", AuditNote("operator", "erased")).wipe([key.tid])
    if happens == "expired":
        world.clock.advance(-KEEP)  # a store shows no response that has expired
    payload = completed(world)[key].payload
    world.clock.advance(KEEP)

    assert payload
    assert payload.sealed_by == ERASED
    world.clock.advance(KEEP + 1)
    assert (410, ["10"]) == (pay(world)[0], world.runs)


def test_a_voided_key_is_remembered(on_store: Any) -> None:
    world = on_store(void=True)
    named: Any = {"headers": {KEY: cast("Any", world).key}, "query_string": {"method": "POST", "path": "/payments"}}
    assert 200 == world.client().delete(STATUS, **named).status_code
    world.clock.advance(KEEP + 1)

    assert ((409, "key-voided"), []) == (pay(world), world.runs)


def test_a_key_that_is_remembered_for_keep_alone_costs_nothing() -> None:
    """A view takes back so what another layer has set."""
    assert Policy(keep=KEEP, remember=KEEP) == Policy(keep=KEEP)
