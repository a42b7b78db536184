"""`flask idempotency …`: parse the arguments, call a verb, print what it returns.

What a verb does is in `operations/` and `maintenance/`. A command exits with 0 when all is in order, with 1 when something
is not or the command refused, and with 2 when nobody can tell. `import flask_idempotency` loads no command: each module
loads when its command is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click
from flask.cli import AppGroup

# Each command, with its module and its name there.
COMMANDS: Final = {
    "db": ("stores", "db"),
    "doctor": ("maintenance", "doctor_command"),
    "expire": ("maintenance", "expire_command"),
    "keys": ("stores", "keys"),
    "list": ("show", "list_command"),
    "policy": ("show", "policy_command"),
    "purge": ("tenants", "purge"),
    "quota": ("tenants", "quota"),
    "reap": ("maintenance", "reap_command"),
    "reconcile": ("maintenance", "reconcile_command"),
    "redis": ("stores", "redis"),
    "release": ("resolve", "release_command"),
    "resolve": ("resolve", "resolve_command"),
    "rotate": ("maintenance", "rotate_command"),
    "seal": ("maintenance", "seal_command"),
    "show": ("show", "show_command"),
    "stats": ("show", "stats_command"),
}


class LazyGroup(AppGroup):
    """A group that imports a command when it is used. Source: click, "Lazily Loading Subcommands"."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return command


cli = LazyGroup("idempotency", help="Look after the records of idempotency keys.")
"""Stateless, so that one object serves every application."""
