"""The Celery application of a janitor that runs alone."""

from __future__ import annotations

import os

from celery import Celery
from flask import Flask
from flask.cli import ScriptInfo, load_dotenv
from flask.helpers import get_load_dotenv

from flask_idempotency.engine.errors import ConfigurationError

from .broker import broker_of
from .tasks import register


def find_flask_app() -> Flask:
    """Return the application that `flask` finds: by FLASK_APP, or in wsgi.py or app.py, made by its factory if there is one."""
    if get_load_dotenv(True):
        load_dotenv()
    return ScriptInfo(os.environ.get("FLASK_APP")).load_app()


def make_celery(flask_app: Flask) -> Celery:
    """Return a Celery application that runs only the tasks of this application.

    Raises `ConfigurationError` if the extension is not set up, or if there is no broker.
    """
    state = flask_app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError(
            "Idempotency is not set up on this Flask application, so a janitor has no work here. Check that FLASK_APP "
            "names the right one."
        )
    broker = broker_of(state.settings)
    celery_app = Celery("flask_idempotency", broker=broker.url, set_as_current=False)
    celery_app.conf.update(
        timezone="UTC",
        enable_utc=True,
        broker_transport_options=broker.options,
        broker_connection_retry_on_startup=True,
        # On a shared broker, no other worker must take our tasks, nor we theirs.
        task_default_queue="idempotency",
        task_ignore_result=True,
        # A task that takes minutes must not reserve tasks that another worker could run.
        worker_prefetch_multiplier=1,
    )
    register(celery_app, flask_app)
    return celery_app
