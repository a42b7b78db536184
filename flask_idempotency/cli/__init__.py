"""The group `flask idempotency`: its modules parse the arguments, call an operation or a task, and print the result.

To add a command, write a function with `@cli.command(...)` in the module of its topic. A command exits with 0 if all is in
order, with 1 if it is not or the command was refused, and with 2 if the result is unknown. `import flask_idempotency` loads
no command: the modules load when the group is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click
from flask.cli import AppGroup

TOPICS: Final = ("maintenance", "resolve", "show", "stores", "tenants")


class LazyGroup(AppGroup):
    """A group that imports the modules of its commands when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        for topic in TOPICS:
            import_module(f"{__name__}.{topic}")


cli = LazyGroup("idempotency", help="Look after the records of idempotency keys.")
"""Stateless, so that one object serves every application."""
