"""The tasks of one Flask application as tasks of one Celery application, and their beat schedule."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from celery import Celery, signals
from flask import Flask

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.maintenance.janitor import LOCK_SECONDS, Janitor, Task
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import drain_of, intervals, janitor_of

__all__ = ["register"]

BUSY: Final = "busy elsewhere"
NO_WORK: Final = "no work for this application"
STORE_UNAVAILABLE: Final = "the store did not answer"

_ADDED: Final = "_flask_idempotency_tasks"
"""Where a Celery application records which tasks it has. They run for the application that is the newest then."""
_SERVED: Final = "_flask_idempotency"
"""Where a Celery application records whose tasks it runs: this module may be imported under two names, and keeps no state."""

_log = logging.getLogger("flask_idempotency")


def name_of(task: Task) -> str:
    """Return the name of a task and of its entry in the beat schedule."""
    return f"flask_idempotency.{task}"


def register(celery_app: Celery, flask_app: Flask) -> None:
    """Let this Celery application run the tasks of this Flask application, as its settings schedule them.

    Add the tasks that have work, and their entries in the beat schedule. Change no broker, queue or time zone; an entry of
    yours with the same name stays. Call it when the Flask application is complete. If a factory calls it for each
    application that it makes, the tasks run for the newest one.

    Raises `ConfigurationError` if the application has no work, or if the Celery application already runs the tasks of
    another one that this factory did not make.
    """
    caller = sys._getframe(1)
    place = caller.f_code, caller.f_lineno
    janitor = janitor_of(flask_app)
    served: list[tuple[Flask, Janitor, object]] = vars(celery_app).setdefault(_SERVED, [])
    former = served[0] if served else None
    if former is not None and former[0] is flask_app:
        return
    if former is not None and not _is_next(flask_app, former[0], same_place=place == former[2]):
        raise ConfigurationError(
            "This Celery application already runs the tasks of another Flask application, and their names would be the "
            "same. Make a Celery application for each."
        )
    settings: Settings = flask_app.extensions["idempotency"].settings
    before = {} if former is None else schedule_of(former[1], former[0].extensions["idempotency"].settings)
    if former is not None and not (former[0].testing or flask_app.testing):
        _log.warning(
            "The janitor's tasks of this Celery application now run for another application that the same factory made. If "
            "both are in use and have different stores, make a Celery application for each."
        )
    served[:] = [(flask_app, janitor, place)]
    added: set[Task] = vars(celery_app).setdefault(_ADDED, set())
    for task in janitor.tasks:
        if task not in added:
            added.add(task)
            _add_task(celery_app, task, settings, served)
    if former is None:
        if vars(celery_app)["configured"]:
            _schedule(celery_app.conf, served)
        # Reading a configuration finalises it, and the application may still set the rest. It may also be rebuilt.
        signals.worker_ready.connect(_beat, weak=False, dispatch_uid=_SERVED)
        configured: Any = celery_app.on_after_configure
        configured.connect(lambda source, **_: _schedule(source, served), weak=False)
    elif vars(celery_app)["configured"]:
        mine: dict[str, Any] = celery_app.conf.beat_schedule
        celery_app.conf.beat_schedule = {name: mine[name] for name in mine if mine[name] != before.get(name)}
        _schedule(celery_app.conf, served)


def _beat(sender: Any, **_: Any) -> None:
    """Send a heartbeat when a worker begins. Until one comes, a task that is not due yet looks as if it never runs."""
    for flask_app, janitor, _place in vars(sender.app).get(_SERVED, ()):
        entry = schedule_of(janitor, flask_app.extensions["idempotency"].settings).get(name_of("heartbeat"))
        if entry is not None:
            sender.app.send_task(entry["task"], **entry["options"])


def _is_next(flask_app: Flask, former: Flask, *, same_place: bool) -> bool:
    """Return whether one factory made both: they have one name, and one extension or one line that registers them."""
    extensions = [each.extensions["idempotency"].extension for each in (flask_app, former)]
    one_name = (flask_app.import_name, flask_app.name) == (former.import_name, former.name)
    return one_name and (same_place or extensions[0] is extensions[1])


def schedule_of(janitor: Janitor, settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the entries of the beat schedule. Each expires when the next is due.

    So a worker that was away finds one message for each task, and not one for each run that it missed.
    """
    every = intervals(settings)
    return {
        name_of(task): {"task": name_of(task), "schedule": every[task], "options": {"expires": every[task]}}
        for task in janitor.tasks
        if task in every
    }


def _add_task(
    celery_app: Celery, task: Task, settings: Settings, served: Sequence[tuple[Flask, Janitor, object]]
) -> None:
    def run() -> Mapping[str, object] | str:
        """Run the task for the newest application, and return what the worker's log shows as its result."""
        flask_app, janitor, _ = served[0]
        if task not in janitor.tasks:
            return NO_WORK
        with flask_app.app_context():
            try:
                report = janitor.run(task, drain_of(task, flask_app.extensions["idempotency"].settings))
            except StoreUnavailable:
                # Logged already, in one line. A traceback every few seconds of an outage would add no fact.
                return STORE_UNAVAILABLE
        return BUSY if report is None else asdict(report)

    run.__name__ = run.__qualname__ = task  # Celery makes a class of it
    budget = drain_of(task, settings).budget
    # A pool that can end a task does so before its lock expires and another worker begins. It must not end a view in a step,
    # which would leave a charge in doubt: the budget of `finish` ends between two requests.
    ended = task != "finish"
    task_of: Any = celery_app.task
    task_of(
        name=name_of(task),
        # A shared task would go to every Celery application that this process makes later.
        shared=False,
        # Another worker runs it again if its worker dies, until it expires; not if it fails, because beat sends the next.
        acks_late=True,
        reject_on_worker_lost=True,
        acks_on_failure_or_timeout=True,
        ignore_result=True,
        soft_time_limit=round(budget + LOCK_SECONDS / 2) if ended else None,
        time_limit=round(budget + LOCK_SECONDS) if ended else None,
    )(run)


def _schedule(conf: Any, served: Sequence[tuple[Flask, Janitor, object]]) -> None:
    flask_app, janitor, _ = served[0]
    entries = schedule_of(janitor, flask_app.extensions["idempotency"].settings)
    # Make a new dict: the present one may be in a module that configures another application too.
    conf.beat_schedule = {**entries, **conf.beat_schedule}
