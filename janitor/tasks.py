"""The chores of one Flask application as tasks of one Celery application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from celery import Celery
from flask import Flask

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.maintenance.janitor import LOCK_SECONDS, Chore, Janitor
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import drain_of, intervals, janitor_of

BUSY: Final = "busy elsewhere"
UNANSWERED: Final = "the store did not answer"

_SERVED: Final = "_flask_idempotency"
"""Where a Celery application remembers whose chores it does: nothing is kept here, because two names may import this."""


def name_of(chore: Chore) -> str:
    """What the task and its entry of the beat schedule are called."""
    return f"flask_idempotency.{chore}"


def register(celery_app: Celery, flask_app: Flask) -> None:
    """Have this Celery application do the chores of this Flask application, at the times that its settings say.

    Adds tasks and entries of the beat schedule, those that there is anything to do for, and changes nothing else: not the
    broker, the queues or the time zone. An entry of yours with the name of one of ours stays yours. Call it when the Flask
    application is whole. Raises `ConfigurationError` when it has nothing to look after, and when the Celery application
    does so for another one already.
    """
    janitor = janitor_of(flask_app)
    served = vars(celery_app).setdefault(_SERVED, [])
    if served == [flask_app]:
        return
    if served:
        raise ConfigurationError(
            "This Celery application does the chores of another Flask application already, and their tasks would have the "
            "same names. Make a Celery application for each."
        )
    served.append(flask_app)
    settings: Settings = flask_app.extensions["idempotency"].settings
    for chore in janitor.chores:
        _add_task(celery_app, chore, settings, partial(_do, flask_app, janitor, chore, settings))
    _add_schedule(celery_app, schedule_of(janitor, settings))


def schedule_of(janitor: Janitor, settings: Settings) -> dict[str, dict[str, Any]]:
    """Entries of a beat schedule. What is not begun by the time of the next one is dropped.

    So a worker that was away finds one of each, and not as many as it has missed.
    """
    every = intervals(settings)
    return {
        name_of(chore): {"task": name_of(chore), "schedule": every[chore], "options": {"expires": every[chore]}}
        for chore in janitor.chores
        if chore in every
    }


def _add_task(celery_app: Celery, chore: Chore, settings: Settings, do: Callable[[], object]) -> None:
    budget = drain_of(chore, settings).budget
    celery_app.task(
        name=name_of(chore),
        # Celery would give it to every application in this process that is made later.
        shared=False,
        # Begun again when its worker died, until it expires; but not because it failed, for beat comes again.
        acks_late=True,
        reject_on_worker_lost=True,
        acks_on_failure_or_timeout=True,
        ignore_result=True,
        # The pools that can end a task do so before its lock runs out, and somebody else begins.
        soft_time_limit=round(budget + LOCK_SECONDS / 2),
        time_limit=round(budget + LOCK_SECONDS),
    )(_named(do, chore))


def _named(do: Callable[[], object], chore: Chore) -> Callable[[], object]:
    """A function of its own, with a name, because Celery makes a class of it."""

    def run() -> object:
        return do()

    run.__name__ = run.__qualname__ = chore
    return run


def _do(flask_app: Flask, janitor: Janitor, chore: Chore, settings: Settings) -> Mapping[str, object] | str:
    """What the worker's log says that became of it."""
    with flask_app.app_context():
        try:
            report = janitor.run(chore, drain_of(chore, settings))
        except StoreUnavailable:
            # Told already, in a line. A traceback every few seconds, while it is away, would tell no more.
            return UNANSWERED
    return BUSY if report is None else asdict(report)


def _add_schedule(celery_app: Any, entries: Mapping[str, Mapping[str, Any]]) -> None:
    def add(conf: Any) -> None:
        # A new one: what is there may be in a module that configures another application as well.
        conf.beat_schedule = {**entries, **conf.beat_schedule}

    if celery_app.configured:
        add(celery_app.conf)
    # To look at a configuration is to end it: somebody may be about to set the rest. It may also be made anew.
    celery_app.on_after_configure.connect(lambda source, **_: add(source), weak=False)
