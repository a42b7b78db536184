"""The tasks as tasks of a Celery application that somebody else has configured."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from celery import signals
from celery.beat import Scheduler
from flask import current_app

from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import Identity, new_token
from flask_idempotency.engine.model import State
from flask_idempotency.engine.recovery import StillUnknown
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, found, stand
from janitor.tasks import BUSY, STORE_UNAVAILABLE, register
from tests.books import book_in
from tests.janitor.apps import a_celery, a_flask, ours, run

ALWAYS = {"flask_idempotency.reap", "flask_idempotency.expire", "flask_idempotency.heartbeat"}
PAST = 1_000_000_000.0
"""By a store whose clock is ahead of this host's, a janitor goes by the host's."""


def test_there_is_a_task_for_each_task_that_there_is_work_for() -> None:
    plain, everything = a_celery(), a_celery()
    register(plain, a_flask())
    register(everything, a_flask(quota_records=5, encryption="on", key_ring=KeyRing({"2026": os.urandom(32)})))

    assert ours(plain) == ALWAYS
    assert ours(everything) == ALWAYS | {"flask_idempotency.rotate", "flask_idempotency.reconcile"}


def test_the_schedule_is_what_the_settings_say() -> None:
    """
    And what a worker has not begun by the time of the next one is dropped: it does not pile up while nobody works.
    """
    celery_app = a_celery()
    register(celery_app, a_flask(reap_interval=7, expire_interval=3600, heartbeat_interval=11))

    assert celery_app.conf.beat_schedule == {
        f"flask_idempotency.{task}": {
            "task": f"flask_idempotency.{task}",
            "schedule": seconds,
            "options": {"expires": seconds},
        }
        for task, seconds in {"reap": 7.0, "expire": 3600.0, "heartbeat": 11.0}.items()
    }


@pytest.mark.parametrize(("every", "sent"), [(30, ["flask_idempotency.heartbeat"]), (None, [])])
def test_a_worker_that_begins_sends_the_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch, every: float | None, sent: list[str]
) -> None:
    """Without it, a task that is not due yet looks for half a minute like one that never runs."""
    celery_app, names = a_celery(), list[str]()
    register(celery_app, a_flask(heartbeat_interval=every))
    monkeypatch.setattr(celery_app, "send_task", lambda name, expires: names.append(name))

    for app in (celery_app, a_celery()):
        signals.worker_ready.send(sender=Mock(app=app))

    assert names == sent


def test_a_task_without_an_interval_is_left_out_of_the_schedule() -> None:
    celery_app = a_celery()
    register(celery_app, a_flask(expire_interval=None))

    assert "flask_idempotency.expire" not in celery_app.conf.beat_schedule
    assert ours(celery_app) == ALWAYS


@pytest.mark.parametrize("when", ("read", "unread", "later", "file"))
def test_what_is_in_a_schedule_stays_there(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"nightly": {"task": "books.close", "schedule": 60.0}}
    theirs["flask_idempotency.reap"] = {"task": "flask_idempotency.reap", "schedule": 99.0}
    celery_app = a_celery(**({"beat_schedule": theirs} if when in ("read", "unread") else {}))
    if when == "read":
        assert celery_app.conf.beat_schedule == theirs
    register(celery_app, a_flask())
    if when == "later":
        celery_app.conf.update(beat_schedule=theirs)
    if when == "file":
        (tmp_path / "theirs_in_a_file.py").write_text(f"beat_schedule = {theirs!r}\n")
        monkeypatch.syspath_prepend(tmp_path)
        celery_app.config_from_object("theirs_in_a_file")

    assert celery_app.conf.beat_schedule | theirs == celery_app.conf.beat_schedule
    assert celery_app.conf.beat_schedule.keys() == ALWAYS | {"nightly"}
    # Another application may be configured by the same object.
    assert theirs.keys() == {"nightly", "flask_idempotency.reap"}


def test_nothing_else_of_a_configuration_is_changed() -> None:
    untouched, celery_app = a_celery(), a_celery()
    register(celery_app, a_flask())
    before, after = dict(untouched.conf), dict(celery_app.conf)
    before.pop("beat_schedule")
    after.pop("beat_schedule")

    assert before == after


def test_a_task_is_begun_again_when_its_worker_died_and_not_when_it_failed() -> None:
    celery_app = a_celery(task_acks_on_failure_or_timeout=False, task_ignore_result=False)
    register(celery_app, a_flask(reap_interval=100))
    task: Any = celery_app.tasks["flask_idempotency.reap"]

    assert (True, True, True) == (task.acks_late, task.reject_on_worker_lost, task.acks_on_failure_or_timeout)
    assert (True, ()) == (task.ignore_result, getattr(task, "autoretry_for", ()))
    # A budget of 80 s, and the 60 for which the lock outlasts it.
    assert (110, 140) == (task.soft_time_limit, task.time_limit)


def test_applications_do_not_mix() -> None:
    clock = FrozenClock(PAST)
    stores = [MemoryStore(clock), MemoryStore(clock)]
    keys = [a_key(), a_key()]
    for store, key in zip(stores, keys, strict=True):
        stand(store, clock, key, "in flight")
    one, other, neither = a_celery(), a_celery(), a_celery()
    # Different in what they have to do, and in when.
    register(one, a_flask(stores[0], name="one", reap_interval=5))
    register(other, a_flask(stores[1], name="other", expire_interval=None, quota_records=9))
    clock.advance(31)
    run(one, "reap")

    assert [State.QUARANTINED, State.PROCESSING] == [
        found(store, key).state for store, key in zip(stores, keys, strict=True)
    ]
    assert ([], {}) == (sorted(ours(neither)), neither.conf.beat_schedule)
    assert (ALWAYS, ALWAYS | {"flask_idempotency.reconcile"}) == (ours(one), ours(other))
    assert 5.0 == one.conf.beat_schedule["flask_idempotency.reap"]["schedule"]
    assert 10.0 == other.conf.beat_schedule["flask_idempotency.reap"]["schedule"]


def test_one_celery_application_does_not_serve_two() -> None:
    """The second one's tasks would silently be the first one's."""
    celery_app = a_celery()
    register(celery_app, a_flask())

    with pytest.raises(ConfigurationError, match="already runs the tasks of another Flask application"):
        register(celery_app, a_flask())


def test_to_register_twice_is_to_register_once() -> None:
    celery_app, app = a_celery(), a_flask()
    for _ in range(2):
        register(celery_app, app)

    assert (ALWAYS, ALWAYS) == (ours(celery_app), set(celery_app.conf.beat_schedule))


def test_a_task_runs_in_its_applications_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of the application's own, and Flask-SQLAlchemy's session, ask which application it is."""
    store, celery_app = MemoryStore(), a_celery()
    register(celery_app, a_flask(store))
    where: list[str] = []

    def sweep(**options: object) -> int:
        where.append(current_app.name)
        return 0

    monkeypatch.setattr(store.expiry, "sweep", sweep)
    run(celery_app, "expire")

    assert ["shop"] == where


def test_a_task_says_what_it_did() -> None:
    idempotency, clock = Idempotency(), FrozenClock(PAST)
    store = MemoryStore(clock)
    idempotency.resolver("payments.create")(lambda unknown: StillUnknown())
    app = a_flask(store, extension=idempotency)
    app.add_url_rule("/payments", endpoint="payments.create", view_func=lambda: "", methods=["POST"])
    celery_app = a_celery()
    register(celery_app, app)
    token = new_token(Identity(b"documented").mark("shop"))
    store.claim(a_request(a_key()), token=token, lease=LEASE)
    clock.advance(LEASE)

    report: Any = run(celery_app, "reap")

    assert (1, 1, 1, True) == (report["quarantined"], report["asked"], report["unknown"], report["finished"])


def test_a_resolver_without_an_endpoint_is_refused_at_once() -> None:
    idempotency = Idempotency()
    idempotency.resolver("nowhere")(lambda unknown: StillUnknown())

    with pytest.raises(ConfigurationError, match="no such endpoint"):
        register(a_celery(), a_flask(extension=idempotency))


def test_a_task_that_somebody_else_is_at_says_so() -> None:
    store, celery_app = MemoryStore(), a_celery()
    register(celery_app, a_flask(store))
    book_in(store, "shop").lock("expire", b"somebody else's", lease=60)

    assert BUSY == run(celery_app, "expire")
    assert {} == book_in(store, "shop").reports()


def test_a_store_that_is_away_costs_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store, celery_app = MemoryStore(), a_celery()
    register(celery_app, a_flask(store))

    def away(*arguments: object, **options: object) -> bool:
        raise StoreUnavailable("nobody answers") from TimeoutError()

    monkeypatch.setattr(store.task_log, "lock", away)
    with caplog.at_level(logging.WARNING, logger="flask_idempotency"):
        assert STORE_UNAVAILABLE == run(celery_app, "reap")

    assert [("WARNING", None)] == [(record.levelname, record.exc_info) for record in caplog.records]
    assert "operation=reap" in caplog.text


def test_any_other_error_is_celerys_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours is not taken for an outage."""
    store, celery_app = MemoryStore(), a_celery()
    register(celery_app, a_flask(store))
    monkeypatch.setattr(store.expiry, "sweep", lambda **options: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        run(celery_app, "expire")


def test_an_application_that_is_switched_off_has_nothing_to_register() -> None:
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_ENABLED is False"):
        register(a_celery(), a_flask("memory://", enabled=False))


def test_entries_are_such_as_beat_reads() -> None:
    celery_app = a_celery()
    register(celery_app, a_flask())
    beat: Any = Scheduler(celery_app)

    assert {"flask_idempotency.reap": 10.0, "flask_idempotency.expire": 60.0, "flask_idempotency.heartbeat": 30.0} == {
        name: entry.schedule.run_every.total_seconds() for name, entry in beat.schedule.items() if name in ALWAYS
    }


@pytest.mark.slow
def test_only_who_runs_a_janitor_needs_celery() -> None:
    """The package's name alone imports nothing, and a worker that only handles requests runs no task."""
    imports = "import sys, janitor, flask_idempotency.extension"
    script = f"{imports}; print('celery' in sys.modules, 'flask_idempotency.maintenance' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert answer.stdout == "False False\n"


def test_a_pool_never_ends_a_view_that_finishes_a_request() -> None:
    """It may be in its charge, which would be in doubt then."""
    app, statuses = a_flask(MemoryStore()), iter((503, 201))
    extension = app.extensions["idempotency"].extension
    extension.act_for(lambda principal, tenant: None)

    def checkout() -> Any:
        current_claim.step("charge", str)
        return {}, next(statuses)

    view = idempotent(required=True, steps=("charge",), finish="janitor")(checkout)
    app.add_url_rule("/checkout", "checkout", view, methods=["POST"])
    celery_app = a_celery()
    register(celery_app, app)
    task = celery_app.tasks["flask_idempotency.finish"]

    assert (None, None) == (task.soft_time_limit, task.time_limit)
    assert 15.0 == celery_app.conf.beat_schedule["flask_idempotency.finish"]["schedule"]
    sent = app.test_client().post("/checkout", json={}, headers={"Idempotency-Key": "k"})
    told: Any = run(celery_app, "finish")
    assert (503, 1, True) == (sent.status_code, told["completed"], told["finished"])
