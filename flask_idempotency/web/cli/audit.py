"""Who gives the word, and why: what every command says that changes something by hand."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from typing import Any

import click

from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.operations import Word
from flask_idempotency.web.cli.group import CommandT


def word_options(*, required: bool) -> Callable[[CommandT], CommandT]:
    """`--reason` and `--actor`. Both are told in the audit event, and so must name no key, person or body."""

    def add(command: CommandT) -> CommandT:
        return actor_option(reason_option(command))

    # A default of None, given to an option that is required, is a value to some releases of click.
    needed: dict[str, Any] = {"required": True} if required else {"default": ""}
    reason_option = click.option(
        "--reason",
        metavar="TEXT",
        **needed,
        callback=_one_line,
        help="Why, for the audit event. Name no key, person or body in it.",
    )
    actor_option = click.option(
        "--actor",
        metavar="NAME",
        default=_whoami,
        show_default="the user of the system",
        callback=_one_line,
        help="Who, for the audit event.",
    )
    return add


def word_of(actor: str, reason: str) -> Word:
    return Word(actor or "unknown", reason)


def _whoami() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container, say, whose user has no name
        return "unknown"


def _one_line(context: click.Context, parameter: click.Parameter, value: str) -> str:
    text = value.strip()
    if (parameter.required and not text) or not text.isprintable() or len(text) > LONGEST_NAME:
        raise click.BadParameter(f"must be one line of text, not longer than {LONGEST_NAME} characters.")
    return text
