"""What all commands share: common options, what they print, and how they end."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

import click

from flask_idempotency.cli.output import Line, say
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.operations.records import AuditNote, one_line
from flask_idempotency.operations.records import Refused as Refused
from flask_idempotency.operations.times import epoch_of, seconds_of

NOT_IN_ORDER: Final = 1
UNKNOWN: Final = 2

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

wide_option: Final = click.option("--wide", is_flag=True, help="Every column.")


def duration(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Read a duration as a person types it, and return its seconds."""
    seconds = seconds_of(value)
    if seconds is None:
        raise click.BadParameter("must be a number of seconds, or one with a unit: 90s, 15m, 2h, 3d.")
    return seconds


def instant(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read a time as a person types it, and return it in seconds since the epoch."""
    seconds = None if value is None else epoch_of(value)
    if value is not None and seconds is None:
        raise click.BadParameter("must be a date or a time, in UTC unless it names another offset: 2026-01-15T09:30.")
    return seconds


@dataclass(frozen=True, slots=True)
class Output:
    """What a command found or did: an object for machines, the same as lines for a person, and its exit code."""

    as_object: object
    lines: Iterable[Line]
    code: int = 0
    notes: Sequence[Line] = ()
    """Lines for the standard error."""


def prints_output(command: Callable[..., Output | None]) -> Callable[..., None]:
    """Take `--json`, print the `Output` that the command returns, and exit with its code.

    An `IdempotencyError` ends the command with one sentence and no traceback.
    """

    @wraps(command)
    def run(*args: Any, as_json: bool, **options: Any) -> None:
        with exit_on_error(as_json=as_json):
            output = command(*args, **options)
        if output is not None:
            say(*([json.dumps(output.as_object)] if as_json else output.lines))
            if output.notes:
                say(*output.notes, err=True)
            if output.code:
                raise SystemExit(output.code)

    return run


def prints_json() -> bool:
    """Return whether the command that runs was given `--json`."""
    return bool(click.get_current_context().params["as_json"])


@contextmanager
def exit_on_error(*, as_json: bool = False) -> Iterator[None]:
    """End the command with one sentence and no traceback if the block raises an `IdempotencyError`."""
    try:
        yield
    except IdempotencyError as error:
        say(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        raise SystemExit(NOT_IN_ORDER if isinstance(error, Refused) else UNKNOWN) from error


def confirm(question: str, *why: Line, yes: bool) -> None:
    """Show why it is asked, and end the command unless the operator agrees. `yes`: they did so before."""
    if not yes:
        say(*why, err=True)
        click.confirm(question, abort=True, err=True)


# The audit note: every command that changes records takes it.


def word_options(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--reason` and `--actor`. The command receives both as `word`.

    The audit event holds both, so they must name no key, person or body. A command that needs a reason asks before it acts:
    then this adds `--yes` too.
    """

    # Some releases of click take a default of None for a value of a required option.
    needed: dict[str, Any] = {"required": True} if required else {"default": ""}

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--actor",
            metavar="NAME",
            default=_whoami,
            show_default="the user of the system",
            callback=_one_line,
            help="The person in the audit event.",
        )
        @click.option(
            "--reason",
            metavar="TEXT",
            **needed,
            callback=_one_line,
            help="The reason in the audit event. Name no key, person or body in it.",
        )
        @wraps(command)
        def noted(*args: Any, actor: str, reason: str, **options: Any) -> Any:
            return command(*args, word=AuditNote(actor or "unknown", reason), **options)

        return click.option("--yes", is_flag=True, help="Skip the confirmation.")(noted) if required else noted

    return add


def _whoami() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        return "unknown"


def _one_line(context: click.Context, parameter: click.Parameter, value: str) -> str:
    text = one_line(value)
    if text is None or (parameter.required and not text):
        raise click.BadParameter(f"must be one line of text, not longer than {LONGEST_NAME} characters.")
    return text


# The tenant of a command. No tenant is never the default.


def tenant_options(command: CommandT) -> CommandT:
    """Add `--tenant T`, and `--no-tenant` for requests without a tenant and applications without a tenant_loader."""
    none = "Requests without a tenant; all requests, if there is no tenant_loader."
    command = click.option("--no-tenant", is_flag=True, help=none)(command)
    return click.option("--tenant", metavar="T", help="The tenant, as the tenant_loader names it.")(command)


def chosen(tenant: str | None, *, no_tenant: bool) -> str | None:
    """Return the chosen tenant, or None for no tenant."""
    if no_tenant == (tenant is not None) or tenant == "":
        raise click.UsageError("Name the tenant: --tenant T, or --no-tenant.")
    return tenant
