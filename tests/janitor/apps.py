"""Guarded Flask applications, and Celery applications that keep to themselves."""

from __future__ import annotations

from typing import Any

from celery import Celery
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.stores.memory import MemoryStore

BROKER = "filesystem:///dev/null"
"""Of tests that send nothing."""


def a_flask(store: Any = None, *, name: str = "shop", extension: Idempotency | None = None, **config: Any) -> Flask:
    """An application with a store of its own; its settings without the prefix."""
    app = Flask(name)
    app.testing = True
    settings = {f"IDEMPOTENCY_{setting.upper()}": value for setting, value in config.items()}
    app.config.update(
        IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60",
        IDEMPOTENCY_AFTER_LOSS="run",
        IDEMPOTENCY_STORE=store or MemoryStore(),
        **settings,
    )
    (extension or Idempotency()).init_app(app)
    return app


def a_celery(**config: Any) -> Celery:
    celery_app = Celery("somebody", broker="memory://", set_as_current=False)
    celery_app.conf.update(config)
    return celery_app


def ours(celery_app: Celery) -> set[str]:
    """The names of the tasks that are not Celery's own."""
    return {name for name in celery_app.tasks if not name.startswith("celery.")}


def run(celery_app: Celery, task: str) -> object:
    """What a worker would log that became of this task."""
    return celery_app.tasks[f"flask_idempotency.{task}"].apply(throw=True).result
