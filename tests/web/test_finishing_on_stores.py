"""The janitor finishes requests on one store of each kind: sealed, while secrets and keys rotate, and with lost replies."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, Final
from uuid import uuid4

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Column, Integer, MetaData, Table

from flask_idempotency import Idempotency, Step, current_claim, idempotent
from flask_idempotency.engine import events
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.doubles import Verb
from flask_idempotency.web.janitor import janitor_of, work_of
from tests.backends import BACKENDS
from tests.lab.programs import REDIS_KINDS
from tests.maintenance.neglected import store_at
from tests.maintenance.stores import empty
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE
from tests.web import finishing
from tests.web.finishing import SECRET as OLD
from tests.web.finishing import counts

__all__ = ["maria_database", "sql_databases", "sql_stores"]

LEASE: Final = 30.0
NEW: Final = "only-tests-5a11b2e8f4c09d73c1d47be2"
RING: Final = {"2026": b64encode(b"k" * 32).decode()}
SEALED: Final[dict[str, Any]] = {"encryption": "required", "key_ring": RING, "allow_plaintext_transport": True}
WORDS: Final = b"a-word-of-the-body"


class Shop(finishing.Shop):
    """One release of the checkout. A word of its requests can be found in the store."""

    def __init__(self, store: Any, clock: FrozenClock, *, fails: bool = False, **config: Any) -> None:
        super().__init__(store, clock, **{"lease": LEASE, **config})
        self.failing, self.cart = fails, WORDS.decode()
        self.keys: list[str] = []
        """The downstream keys of the steps that ran."""

    def run(self, name: str, result: Any = None) -> Any:
        self.keys.append(current_claim.downstream_key(name))
        return super().run(name, result)


@pytest.fixture(params=("memory", CORE[-1], *REDIS_KINDS, "sqlite", "postgres"))
def store(request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Any]:
    """A store with nothing of other tests in it: a janitor looks at everything."""
    with ExitStack() as ends:
        if request.param in ("memory", CORE[-1]):
            yield BACKENDS[request.param](request, ends)(clock)
        else:
            made = store_at(empty(request.param, request), clock)
            ends.callback(made.close)
            yield made


def stored(store: Any) -> bytes:
    """All payloads of all journals."""
    found, after = [], b""
    while True:
        page = store.journals.walk(after=after, limit=100)
        found += [answer.entry.payload.data for answer in page.answers]
        if page.after is None:
            return b"".join(found)
        after = page.after


@pytest.mark.parametrize("config", ({"compression": "off"}, SEALED), ids=("plain", "sealed"))
def test_a_paused_request_is_finished(store: Any, clock: FrozenClock, config: dict[str, Any]) -> None:
    first = Shop(store, clock, fails=True, **config)
    assert "paused" == first.post().headers["Idempotency-Status"]
    assert (config is SEALED) is (WORDS not in stored(store))
    assert (config is SEALED) is (b"alice" not in stored(store))
    later = Shop(store, clock, **config)

    assert {"completed": 1} == counts(later.finish())
    assert ({"reserve": 1, "charge": 1}, {"mail": 1}) == (first.ran, later.ran)
    assert (201, "true") == ((again := later.post()).status_code, again.headers["Idempotency-Replayed"])
    assert b"" == stored(store)
    assert {} == counts(later.finish())


def test_a_worker_that_vanished_is_followed_when_its_lease_is_over(store: Any, clock: FrozenClock) -> None:
    shop = Shop(store, clock, fails=True)
    guard: Any = shop.app.extensions["idempotency"].hooks._guard
    guard.finish = lambda state, response: None
    guard.abandon = lambda state, error: None
    shop.post()
    later = Shop(store, clock)

    assert {} == counts(later.finish())
    clock.advance(LEASE + 1)
    assert {"completed": 1} == counts(later.finish())
    assert ({"reserve": 1, "charge": 1}, {"mail": 1}) == (shop.ran, later.ran)


@pytest.mark.parametrize(
    ("first", "then", "finished"),
    (
        ([OLD], [NEW, OLD], False),
        ([NEW, OLD], [NEW, OLD], True),
        ([NEW, OLD], [NEW], True),
        ([OLD], [NEW], False),
    ),
    ids=("added", "both", "removed", "replaced"),
)
def test_secrets_may_rotate_between_a_pause_and_its_end(
    store: Any, clock: FrozenClock, first: list[str], then: list[str], finished: bool
) -> None:
    """Downstream keys stay those of the client's retry. What no client could retry, no janitor finishes."""
    Shop(store, clock, secret=first, fails=True).post()
    Shop(store, clock, secret=first, fails=True).post("other")
    by_client, by_janitor = Shop(store, clock, secret=then), Shop(store, clock, secret=then)
    if finished:
        assert 201 == by_client.post("other").status_code
    found = counts(by_janitor.finish())

    # A request has a record under each secret, and the try that completes the first completes the other.
    assert int(finished) == found.get("completed", 0), found
    assert not {"failed", "gave_up", "quarantined"} & found.keys()
    if finished:
        assert (201, "true") == ((again := by_janitor.post()).status_code, again.headers["Idempotency-Replayed"])
        assert {"mail": 1} == by_janitor.ran


@pytest.mark.parametrize("secrets", ([OLD], [NEW, OLD]), ids=("one", "two"))
def test_downstream_keys_are_those_of_the_first_attempt(clock: FrozenClock, secrets: list[str]) -> None:
    store = MemoryStore(clock)
    first = Shop(store, clock, secret=secrets, fails=True)
    first.post()
    later = Shop(store, clock, secret=secrets)
    seen: list[str] = []
    view = later.checkout

    def checkout() -> Any:
        seen.extend(current_claim.downstream_key(name) for name in ("reserve", "charge"))
        return view()

    later.checkout = checkout  # type: ignore[method-assign]
    assert 1 == later.finish().completed
    assert first.keys == seen


def test_a_new_key_of_the_ring_seals_the_request_again(store: Any, clock: FrozenClock) -> None:
    Shop(store, clock, fails=True, **SEALED).post()
    ring = {"2027": b64encode(b"n" * 32).decode(), **RING}
    later = Shop(store, clock, **{**SEALED, "key_ring": ring})
    before = stored(store)
    janitor_of(later.app, host_clock=clock).run("rotate", Batcher(sleep=lambda seconds: None))

    assert before != stored(store)
    newest = Shop(store, clock, **{**SEALED, "key_ring": {"2027": ring["2027"]}})
    assert {"completed": 1} == counts(newest.finish())


@pytest.mark.parametrize("how", ((), ("--shred",)), ids=("purge", "shred"))
def test_a_purge_removes_the_request(store: Any, clock: FrozenClock, how: tuple[str, ...]) -> None:
    shop = Shop(store, clock, fails=True, **SEALED)
    shop.post()
    words = ("purge", "--tenant", "acme", "--yes", "--actor", "ann", "--reason", "asked to", *how)
    told = shop.app.test_cli_runner().invoke(args=["idempotency", *words])
    assert 0 == told.exit_code, told.output
    shop.failing = False

    assert {"unreadable": 1} == counts(shop.finish())
    assert {"reserve": 1, "charge": 1} == shop.ran


class Losing:
    """A store that loses calls of the worker, and has all else of the real one."""

    def __init__(self, store: Any) -> None:
        self._store, self.faulty = store, FaultyStore(store)

    def __getattr__(self, name: str) -> Any:
        there = name in ("claim", "renew", "complete", "release", "quarantine", "read", "mark_corrupt", "journals")
        return getattr(self.faulty if there or name == "mark_point_of_no_return" else self._store, name)


LOST: Final[tuple[tuple[Verb, int], ...]] = (
    ("claim", 1),
    ("recall", 1),
    ("write", 1),
    ("write", 2),
    ("write", 3),
    ("complete", 1),
    ("read", 1),
)


@pytest.mark.parametrize(("lost", "reply"), list(product(LOST, (True, False))))
def test_a_call_that_is_lost_in_a_try_runs_nothing_twice(
    clock: FrozenClock, lost: tuple[Verb, int], reply: bool
) -> None:
    store = MemoryStore(clock)
    Shop(store, clock, fails=True).post()
    losing = Losing(store)
    shop = Shop(losing, clock)
    (losing.faulty.lose_reply if reply else losing.faulty.lose_request)(lost[0], nth=lost[1])
    for _ in range(8):
        with suppress(StoreUnavailable):
            shop.finish()
        if {State.COMPLETED} == {record.state for record in store._shared.records.values()}:
            break
        clock.advance(3700)

    assert (201, "true") == ((again := shop.post()).status_code, again.headers["Idempotency-Replayed"])
    assert 1 == shop.ran["mail"]
    assert 0 == shop.ran["charge"]
    assert [] == [each for each in shop.events if isinstance(each, events.FinishGaveUp)]


@pytest.mark.parametrize("refused", (False, True))
def test_a_request_is_committed_with_the_row_of_its_first_step(tmp_path: Path, refused: bool) -> None:
    """Or is rolled back with it."""
    db = SQLAlchemy(metadata=MetaData())
    orders = Table("orders", db.metadata, Column("id", Integer, primary_key=True))
    app, failing = Flask("shop"), [True]
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite'}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": OLD,
    }
    db.init_app(app)
    extension = Idempotency(app)
    extension.act_for(lambda principal, tenant: None)

    def save() -> None:
        db.session.execute(orders.insert().values(id=7))
        if refused and failing:
            db.session.execute(orders.insert().values(id=7))

    def view() -> Any:
        current_claim.step("save", save)
        return {}, 503 if failing else 201

    steps = (Step("save", effects="transactional"),)
    view = idempotent(required=True, steps=steps, finish="janitor")(view)
    app.add_url_rule("/checkout", "checkout", view, methods=["POST"])
    with app.app_context():
        db.create_all()
    client = app.test_client()
    headers = {"Idempotency-Key": "k"}
    first = client.post("/checkout", json={}, headers=headers).status_code
    failing.clear()
    report: Any = janitor_of(app).run("finish", Batcher())

    assert (500, {}) == (first, counts(report)) if refused else (503, {"completed": 1}) == (first, counts(report))
    again = client.post("/checkout", json={}, headers=headers)
    assert (201, not refused) == (again.status_code, "Idempotency-Replayed" in again.headers)
    with app.app_context():
        assert [7] == list(db.session.scalars(orders.select()))
        db.session.remove()
        db.engine.dispose()


def test_many_janitors_and_clients_together_run_it_once(store: Any, clock: FrozenClock) -> None:
    keys = [uuid4().hex for _ in range(5)]
    first = Shop(store, clock, fails=True)
    for key in keys:
        first.post(key)
    shop = Shop(store, clock)
    barrier, statuses = Barrier(4), Counter[int]()

    def janitor() -> None:
        # Without the lock of the task, which only saves work.
        every = work_of(shop.app)
        barrier.wait(60)
        every["finish"](clock.now, Batcher())

    def client() -> None:
        barrier.wait(60)
        statuses.update(shop.post(key).status_code for key in keys)

    threads = [Thread(target=each) for each in (janitor, janitor, client, client)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert {"reserve": 5, "charge": 5} == first.ran
    assert {"mail": 5} == shop.ran
    assert {201, 409} >= set(statuses)
    assert [201] * 5 == [shop.post(key).status_code for key in keys]
