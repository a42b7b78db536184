"""The application notices that no janitor comes, at the price of one question now and then."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.assembly import is_process_local
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import Event, JanitorMissing
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.web.monitors import JanitorMonitor

EVERY = 30.0


class CountedBook:
    """A task book that counts how often it is looked into, and may be out of reach."""

    def __init__(self, store: MemoryStore) -> None:
        self._book = store.task_log
        self.report = store.task_log.report
        self.now = store.task_log.now
        self.lock = store.task_log.lock
        self.unlock = store.task_log.unlock
        self.looks = 0
        self.error: Exception | None = None

    def reports(self) -> Mapping[str, TaskReport]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self._book.reports()


class Shared(FaultyStore):
    """A store that other processes can see, as far as anybody can tell."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.task_log = CountedBook(store)


@dataclass
class Watched:
    """A watch, its clocks, and what it told."""

    clock: FrozenClock
    book: CountedBook
    watch: JanitorMonitor
    told: list[Event] = field(default_factory=list)

    def look_after(self, seconds: float) -> int:
        """How much was told so far, once so many seconds have passed and a request has ended."""
        self.clock.advance(seconds)
        self.watch.look()
        return len(self.told)


@pytest.fixture
def watched() -> Watched:
    clock = FrozenClock()
    book, told = CountedBook(MemoryStore(clock)), list[Event]()
    return Watched(clock, book, JanitorMonitor(book, told.append, every=EVERY, monotonic=clock), told)


def test_the_store_is_not_asked_before_two_intervals(watched: Watched) -> None:
    """Counted from the process's first keyed request: the janitor may be starting as we are."""
    told = [watched.look_after(seconds) for seconds in (1000, 0, 30, 29.9)]

    assert ([0, 0, 0, 0], 0) == (told, watched.book.looks)


def test_a_missing_janitor_is_published_once(watched: Watched) -> None:
    """With how long it has been watched for; and the question is asked once in two intervals, not at each request."""
    told = [watched.look_after(seconds) for seconds in (0, 61, 1, 1, 61, 61)]

    assert ([0, 1, 1, 1, 1, 1], 3) == (told, watched.book.looks)
    assert [JanitorMissing("", "", seconds=61)] == watched.told


@pytest.mark.parametrize("task", ("heartbeat", "reap", "expire"))
def test_any_task_is_a_sign_of_a_janitor(watched: Watched, task: str) -> None:
    """Who sweeps by cron has no heartbeat."""
    watched.look_after(0)
    watched.clock.advance(1)
    watched.book.report(task, "{}")

    assert 0 == watched.look_after(60)


def test_a_relay_is_no_sign_of_a_janitor(watched: Watched) -> None:
    watched.look_after(0)
    watched.clock.advance(1)
    watched.book.report("relay", "{}")

    assert 1 == watched.look_after(60)


def test_a_silence_after_a_report_is_published_again(watched: Watched) -> None:
    """With how long it has lasted. In between there is nothing to tell."""
    watched.look_after(0)
    first = watched.look_after(61)
    watched.book.report("reap", "{}")
    back = watched.look_after(60)
    again = watched.look_after(60)

    assert (1, 1, 2) == (first, back, again)
    assert JanitorMissing("", "", seconds=120) == watched.told[-1]


@pytest.mark.parametrize("error", (StoreUnavailable("away"), RuntimeError("a bug in a store")))
def test_a_failed_look_at_the_task_log_is_ignored(
    watched: Watched, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again after as long, and nothing is concluded from it."""
    watched.look_after(0)
    watched.book.error = error
    with caplog.at_level(logging.DEBUG, logger="flask_idempotency"):
        told = [watched.look_after(61), watched.look_after(1)]

    assert ([0, 0], 1) == (told, watched.book.looks)
    assert [f"It is unknown whether a janitor runs ({type(error).__name__})."] == caplog.messages
    watched.book.error = None
    assert 1 == watched.look_after(60)


def an_app(store: Any, **config: Any) -> Flask:
    app = Flask("shop")
    app.config.update(IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60", IDEMPOTENCY_STORE=store, **config)
    Idempotency(app)
    app.post("/")(lambda: "paid")
    return app


def post(app: Flask, key: str | None) -> None:
    app.test_client().post("/", headers={} if key is None else {"Idempotency-Key": key})


def test_only_keyed_requests_look_for_a_janitor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New, replayed or refused; the warning says what to do."""
    clock = FrozenClock()
    monkeypatch.setattr(JanitorMonitor.__init__, "__kwdefaults__", {"monotonic": clock})
    store = Shared(MemoryStore(clock))
    app = an_app(store)
    looks = []
    for key in ("a", None, "b", None, "b", "not\tone"):
        post(app, key)
        looks.append(store.task_log.looks)
        clock.advance(61)

    # The first one has looked at the shape of identity besides, and noted it.
    assert [2 + number for number in (0, 0, 1, 1, 2, 2)] == looks
    assert ["janitor worker -B" in line for line in caplog.messages if "No janitor" in line] == [True]


@pytest.mark.parametrize(
    ("store", "config"),
    (
        (MemoryStore(), {}),
        ("memory://", {}),
        (FaultyStore(MemoryStore()), {}),
        (Shared(MemoryStore()), {"IDEMPOTENCY_HEARTBEAT_INTERVAL": None}),
    ),
    ids=("memory", "memory-url", "no-task-book", "no-janitor-expected"),
)
def test_there_is_no_monitor_if_no_janitor_is_expected(
    store: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process's own memory is seen by no other, and some stores keep no book."""
    made: list[object] = []
    monkeypatch.setattr(JanitorMonitor, "look", made.append)
    app = an_app(store, **config)
    app.testing = True
    post(app, "k")

    assert [] == made


def test_a_process_local_store_is_recognised() -> None:
    """The object and the URL alike."""
    states = [an_app(store).extensions["idempotency"] for store in ("memory://", MemoryStore(), Shared(MemoryStore()))]

    assert [True, True, False] == [is_process_local(state.settings) for state in states]
