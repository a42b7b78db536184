"""Shell completion of values that only the application knows. click completes commands, options and choices by itself.

A completion prints no error and calls no store: the person at the terminal has not run a command yet.
"""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import click
from flask.cli import ScriptInfo

from flask_idempotency.web.policies import SAFE


def complete_endpoint(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the endpoints in scope, inboxes and tasks that begin with this text. Empty if the application cannot be loaded."""
    # Discard what the application prints and logs while it loads.
    before = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            app = context.ensure_object(ScriptInfo).load_app()
            with app.app_context():
                state: Any = app.extensions.get("idempotency")
                pairs = () if state is None or state.policies is None else state.policies.pairs()
                messages = [] if state is None else state.loaders.operations.names()
    except (Exception, SystemExit):  # noqa: BLE001 - the application's own code runs here
        return []
    finally:
        logging.disable(before)
    names = {*messages, *(name for name, method in pairs if method not in SAFE)}
    return sorted(name for name in names if name.startswith(incomplete))
