"""The Celery application of a janitor that has one for itself."""

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
    """The application that `flask` would find: by FLASK_APP, or as wsgi.py or app.py, made by its factory if it has one."""
    if get_load_dotenv(True):
        load_dotenv()
    return ScriptInfo(os.environ.get("FLASK_APP")).load_app()


def make_celery(flask_app: Flask) -> Celery:
    """A Celery application that does this one's chores, and nothing else. Raises `ConfigurationError` without a broker."""
    state = flask_app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError(
            "Idempotency is not set up on this Flask application, so there is nothing for a janitor to look after. Check "
            "that FLASK_APP names the right one."
        )
    broker = broker_of(state.settings)
    celery_app = Celery("flask_idempotency", broker=broker.url, set_as_current=False)
    celery_app.conf.update(
        timezone="UTC",
        enable_utc=True,
        broker_transport_options=broker.options,
        broker_connection_retry_on_startup=True,
        # A broker that others use as well must not hand their tasks to us, nor ours to them.
        task_default_queue="idempotency",
        task_ignore_result=True,
        # A chore that takes minutes must not keep in its worker what another could do.
        worker_prefetch_multiplier=1,
    )
    register(celery_app, flask_app)
    return celery_app
