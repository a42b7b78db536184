"""What real workers look after: an application that is configured by its environment, and writes down what it is told."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from celery.signals import beat_embedded_init
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.engine.events import Event, Reaped, TaskRun
from flask_idempotency.maintenance import janitor
from flask_idempotency.signals import reaped, task_run
from flask_idempotency.web import janitor as tasks

PR_SET_PDEATHSIG = 1

if os.environ.get("SHOP_HURRIES"):
    # A dead worker's lock is over within a test's patience, and a sweep of a few records is a long one.
    janitor.LOCK_SECONDS = tasks.SHORTEST_BUDGET_SECONDS = 1.0  # type: ignore[misc]
    tasks.BATCHES["expire"] = 1


@beat_embedded_init.connect
def _die_with_worker(**_: object) -> None:
    # The one child of a worker that outlives its SIGKILL, and with it a test run's.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def create_app() -> Flask:
    """Configured by FLASK_IDEMPOTENCY_…; it appends what happens to SHOP_DIARY."""
    app = Flask("shop")
    app.config.from_prefixed_env()
    Idempotency(app)
    # By whichever process: weak=False, because nothing else holds on to the function.
    for told in (reaped, task_run):
        told.connect(_write_down, app, weak=False)
    return app


def _write_down(sender: Flask, event: Event) -> None:
    said = f"reaped {event.record}" if isinstance(event, Reaped) else f"done {event.operation}"
    if isinstance(event, TaskRun) and event.error:
        said = f"failed {event.operation}"
    with Path(os.environ["SHOP_DIARY"]).open("a") as diary:
        diary.write(f"{said} {os.getpid()}\n")
