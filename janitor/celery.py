"""The entry point that `celery -A flask_idempotency.janitor` finds, and in a checkout `celery -A janitor`."""

from __future__ import annotations

import sys

import click

from flask_idempotency.engine.errors import ConfigurationError

from .app import find_flask_app, make_celery

try:
    app = make_celery(find_flask_app())
except (ConfigurationError, click.ClickException) as error:
    # For any other exception `celery` prints its traceback, which hides the remedy.
    sys.exit(f"The janitor cannot start. {error}")
