"""The group `flask idempotency`: its modules parse the arguments, call an operation or a task, and print the result.

To add a command, write a function with `@cli.command(...)` in the module of its topic, and put its name in `ORDER`. It
returns an `Output`: the same facts as an object and as lines, and the exit code. Its docstring starts with an imperative,
says what the command changes, and ends with one example. A command exits with 0 if all is in order, with 1 if it is not or
the command was refused, with 2 if the result is unknown, and with 130 after Ctrl-C.
`import flask_idempotency` loads no command: the modules load when the group is first used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import click
from flask.cli import AppGroup

TOPICS: Final = ("maintenance", "outbox", "resolve", "show", "stats", "stores", "tenants")

ORDER: Final = (
    *("doctor", "stats", "list", "show", "policy", "report"),
    *("resolve", "release", "void"),
    *("reap", "finish", "expire", "rotate", "reconcile"),
    *("relay", "outbox"),
    *("purge", "quota", "seal"),
    *("db", "keys", "redis"),
)
"""The order of the commands in `--help`: look, resolve, maintain, messages, one tenant, the store itself."""

INTERRUPTED: Final = 130
"""The exit code of a shell command that Ctrl-C ended: 128 + SIGINT."""

EXIT_CODES: Final = (
    (0, "done, or all is in order"),
    (1, "refused, not confirmed, or something is not in order"),
    (2, "unknown, because the store did not answer; or a wrong option"),
    (INTERRUPTED, "ended by Ctrl-C"),
)


class Commands(AppGroup):
    """A group of commands that return an `Output`."""

    def command(self, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], click.Command]:  # type: ignore[override]
        """Make a command of a function: add `--json`, and print what it returns."""
        register, printing = super().command(*args, **options), import_module(f"{__name__}.context").prints_output

        def add(function: Callable[..., Any]) -> click.Command:
            command = register(printing(function))
            command.params.append(
                click.Option(["--json", "as_json"], is_flag=True, help="One JSON object, for machines.")
            )
            return command

        return add


class LazyGroup(Commands):
    """A group that imports the modules of its commands when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load()
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        self._load()
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort) as error:
            # click would exit with 1, and a script could not tell this from a refusal. A question of click raises `Abort` for
            # Ctrl-C, and for the end of the input.
            if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
                raise
            import_module(f"{__name__}.output").say("\nInterrupted.", err=True)
            raise SystemExit(INTERRUPTED) from None

    def _load(self) -> None:
        for topic in TOPICS:
            import_module(f"{__name__}.{topic}")


def completing() -> bool:
    """Return True while a shell asks `flask` for completions: then no store is called and nothing is logged."""
    return "_FLASK_COMPLETE" in os.environ


def migrating() -> bool:
    """Return True in `flask db …` and `flask idempotency db …`: they create the tables, or report what is wrong with them."""
    command = click.get_current_context(silent=True)
    if command is None:
        return False
    if command.parent is None:
        # `flask` loads the application to find its commands, and click has not named the command yet.
        return any(word == "db" and not before.startswith("-") for before, word in pairwise(sys.argv))
    return " db " in f"{command.command_path} "


cli: Final = LazyGroup(
    "idempotency",
    help="Check, show and repair the records of idempotency keys.",
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES),
)
"""Stateless, so that one object serves every application."""
