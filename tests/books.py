"""One application's pages in the book of tasks of a store."""

from __future__ import annotations

from typing import Any

from flask import Flask

from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.tasks import OwnTaskLog, TaskLog


def book_of(app: Flask) -> TaskLog:
    """As its janitor writes it."""
    book: TaskLog = app.extensions["idempotency"].built.tasks
    return book


def book_in(store: Any, namespace: str) -> TaskLog:
    """The same before there is an application."""
    return OwnTaskLog(store.task_log, owner=owner_mark(namespace))
