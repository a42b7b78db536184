"""The tasks of one Flask application as tasks of one Celery application, and their beat schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from celery import Celery
from flask import Flask

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.maintenance.janitor import LOCK_SECONDS, Janitor, Task
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import drain_of, intervals, janitor_of

__all__ = ["register"]

BUSY: Final = "busy elsewhere"
STORE_UNAVAILABLE: Final = "the store did not answer"

_SERVED: Final = "_flask_idempotency"
"""Where a Celery application records whose tasks it runs: this module may be imported under two names, and keeps no state."""


def name_of(task: Task) -> str:
    """Return the name of a task and of its entry in the beat schedule."""
    return f"flask_idempotency.{task}"


def register(celery_app: Celery, flask_app: Flask) -> None:
    """Let this Celery application run the tasks of this Flask application, as its settings schedule them.

    Add the tasks that have work, and their entries in the beat schedule. Change no broker, queue or time zone; an entry of
    yours with the same name stays. Call it when the Flask application is complete. Raises `ConfigurationError` if that has
    no work, or if the Celery application already runs the tasks of another.
    """
    janitor = janitor_of(flask_app)
    served = vars(celery_app).setdefault(_SERVED, [])
    if served == [flask_app]:
        return
    if served:
        raise ConfigurationError(
            "This Celery application already runs the tasks of another Flask application, and their names would be the "
            "same. Make a Celery application for each."
        )
    served.append(flask_app)
    settings: Settings = flask_app.extensions["idempotency"].settings
    for task in janitor.tasks:
        _add_task(celery_app, task, settings, partial(_do, flask_app, janitor, task, settings))
    _add_schedule(celery_app, schedule_of(janitor, settings))


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


def _add_task(celery_app: Celery, task: Task, settings: Settings, do: Callable[[], object]) -> None:
    budget = drain_of(task, settings).budget
    celery_app.task(
        name=name_of(task),
        # A shared task would go to every Celery application that this process makes later.
        shared=False,
        # Another worker runs it again if its worker dies, until it expires; not if it fails, because beat sends the next.
        acks_late=True,
        reject_on_worker_lost=True,
        acks_on_failure_or_timeout=True,
        ignore_result=True,
        # A pool that can end a task does so before its lock expires and another worker begins.
        soft_time_limit=round(budget + LOCK_SECONDS / 2),
        time_limit=round(budget + LOCK_SECONDS),
    )(_named(do, task))


def _named(do: Callable[[], object], task: Task) -> Callable[[], object]:
    """Return a new function with the name of the task, because Celery makes a class of it."""

    def run() -> object:
        return do()

    run.__name__ = run.__qualname__ = task
    return run


def _do(flask_app: Flask, janitor: Janitor, task: Task, settings: Settings) -> Mapping[str, object] | str:
    """Run the task, and return what the worker's log shows as its result."""
    with flask_app.app_context():
        try:
            report = janitor.run(task, drain_of(task, settings))
        except StoreUnavailable:
            # Logged already, in one line. A traceback every few seconds of an outage would add no fact.
            return STORE_UNAVAILABLE
    return BUSY if report is None else asdict(report)


def _add_schedule(celery_app: Any, entries: Mapping[str, Mapping[str, Any]]) -> None:
    def add(conf: Any) -> None:
        # Make a new dict: the present one may be in a module that configures another application too.
        conf.beat_schedule = {**entries, **conf.beat_schedule}

    if celery_app.configured:
        add(celery_app.conf)
    # Reading a configuration finalises it, and the application may still set the rest. It may also be rebuilt.
    celery_app.on_after_configure.connect(lambda source, **_: add(source), weak=False)
