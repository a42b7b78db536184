"""The entry point that `celery -A flask_idempotency.janitor` finds, and in a checkout `celery -A janitor`."""

from __future__ import annotations

from .app import find_flask_app, make_celery

app = make_celery(find_flask_app())
