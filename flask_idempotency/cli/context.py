"""What all commands share: common options, and how a command ends."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import click

from flask_idempotency.cli.output import say
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.operations.records import AuditNote, one_line
from flask_idempotency.operations.records import Refused as Refused

NOT_IN_ORDER: Final = 1
UNKNOWN: Final = 2

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
wide_option = click.option("--wide", is_flag=True, help="Every column, and nothing shortened.")


def duration(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Read a duration as a person types it, and return its seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter("must be a number of seconds, or one with a unit: 90s, 15m, 2h, 3d.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@contextmanager
def exit_on_error(*, as_json: bool) -> Iterator[None]:
    """End the command with one sentence and no traceback if the block raises an `IdempotencyError`."""
    try:
        yield
    except Refused as error:
        _end(str(error), NOT_IN_ORDER, as_json=as_json)
    except IdempotencyError as error:
        _end(str(error), UNKNOWN, as_json=as_json)


def _end(why: str, code: int, *, as_json: bool) -> NoReturn:
    if as_json:
        say(json.dumps({"error": why}))
    else:
        say(f"Error: {why}", err=True)
    raise SystemExit(code)


# The audit note: every command that changes records takes it.


def word_options(*, required: bool) -> Callable[[CommandT], CommandT]:
    """Add `--reason` and `--actor`. The audit event holds both, so they must name no key, person or body."""

    def add(command: CommandT) -> CommandT:
        return actor_option(reason_option(command))

    # Some releases of click take a default of None for a value of a required option.
    needed: dict[str, Any] = {"required": True} if required else {"default": ""}
    reason_option = click.option(
        "--reason",
        metavar="TEXT",
        **needed,
        callback=_one_line,
        help="The reason in the audit event. Name no key, person or body in it.",
    )
    actor_option = click.option(
        "--actor",
        metavar="NAME",
        default=_whoami,
        show_default="the user of the system",
        callback=_one_line,
        help="The person in the audit event.",
    )
    return add


def word_of(actor: str, reason: str) -> AuditNote:
    return AuditNote(actor or "unknown", reason)


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
    for option in (
        click.option(
            "--no-tenant", is_flag=True, help="Requests without a tenant; all requests, if there is no tenant_loader."
        ),
        click.option("--tenant", metavar="T", help="The tenant, as the tenant_loader names it."),
    ):
        command = option(command)
    return command


def chosen(tenant: str | None, *, no_tenant: bool) -> str | None:
    """Return the chosen tenant, or None for no tenant."""
    if no_tenant == (tenant is not None) or tenant == "":
        raise click.UsageError("Name the tenant: --tenant T, or --no-tenant.")
    return tenant
