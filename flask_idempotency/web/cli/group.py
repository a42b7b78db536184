"""What all commands share: their group, their options, the application they are about, and how they give up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, NoReturn, TypeVar

import click
from flask import current_app
from flask.cli import AppGroup

from flask_idempotency.assembly import Built, identities
from flask_idempotency.engine.capabilities import Loss, Unsettled
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.escape import printable, printable_lines
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.operations import Refused as Refused
from flask_idempotency.settings import Settings
from flask_idempotency.web.chores import settler_of
from flask_idempotency.web.policies import Policies

NOT_IN_ORDER: Final = 1
UNKNOWN: Final = 2

cli = AppGroup("idempotency", help="Look after the records of idempotency keys.")
"""Stateless, so that one object serves every application."""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")


def state() -> Any:
    """What the application of this command has: `extension.AppState`."""
    found = current_app.extensions.get("idempotency")
    if found is None:
        raise IdempotencyError("Idempotency is not set up on this application: call init_app first.")
    return found


def built() -> Built:
    """The parts that the application's guard works with."""
    parts: Built | None = state().built
    if parts is None:
        raise Refused("IDEMPOTENCY_ENABLED is False, so this application has no store to look into.")
    return parts


def settings() -> Settings:
    chosen: Settings = state().settings
    return chosen


def policies() -> Policies:
    chosen: Policies | None = state().policies
    if chosen is None:
        raise Refused("IDEMPOTENCY_ENABLED is False, so no policy applies to any endpoint of this application.")
    return chosen


def unsettled() -> Unsettled:
    """The records of this application's store by state."""
    found = built().unsettled
    if found is None:
        raise Refused("The store of this application cannot be searched: it has no `unsettled`.")
    return found


def settler() -> Settler:
    found = settler_of(built(), settings(), state().observers)
    if found is None:
        raise Refused("The store of this application lets nobody settle a key but its owner: it has no `unsettled`.")
    return found


def identity() -> Identity:
    """Of the newest secret."""
    return identities(settings())[0]


def tell(event: Event) -> None:
    """Tell whoever listens to this application's events."""
    state().observers(event)


def tids_by_secret(tenant: str | None) -> list[tuple[bytes, ...]]:
    """What stands for the parts of this tenant in the store, under every secret in use, the newest first; and then under
    the former namespace."""
    former, namespaces = settings().former_identity, [settings().namespace]
    if former is not None and former.namespace not in (None, namespaces[0]):
        namespaces.append(former.namespace or "")
    return [who.tenant_ids(namespace, tenant) for namespace in namespaces for who in identities(settings())]


def every_tids(tenant: str | None) -> list[tuple[bytes, ...]]:
    """The same, and under the names before a change of identity too. Others may share these: only to find twins by token."""
    former, own = settings().former_identity, tids_by_secret(tenant)
    if former is None:
        return own
    namespace, before = former.namespace or settings().namespace, None if former.tenant is False else tenant
    return own + [who.tenant_ids(namespace, before) for who in identities(settings())]


def tids(tenant: str | None) -> list[bytes]:
    """All that stands for this tenant in the store: of every part, under every secret in use."""
    return list(chain.from_iterable(tids_by_secret(tenant)))


def check_layout() -> None:
    """Raises `Refused` where the settings of this host look for a tenant where the store does not keep it."""
    memory = built().memory
    if memory is not None and Loss.FOREIGN.value in memory.standing().losses:
        raise Refused(
            "This Redis is another one than IDEMPOTENCY_STORE_ID names, or was made for another IDEMPOTENCY_TENANT_SHARDS: "
            "little of the tenant would be found. Nothing was changed. `flask idempotency redis status` says more."
        )


def pseudonym(tenant: str | None) -> str:
    """What stands for this tenant in a log."""
    return "-" if tenant is None else identity().pseudonym(tenant)


@contextmanager
def giving_up(*, as_json: bool) -> Iterator[None]:
    """Whatever we raise on purpose ends the command with one sentence, and no traceback."""
    try:
        yield
    except Refused as error:
        _end(str(error), NOT_IN_ORDER, as_json=as_json)
    except IdempotencyError as error:
        _end(str(error), UNKNOWN, as_json=as_json)


def say(text: str = "", *, err: bool = False, newline: bool = True) -> None:
    """Write to the terminal. Nothing that the terminal would act on gets there, whoever wrote it."""
    click.echo(printable_lines(text), err=err, nl=newline)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns under their names, as wide as they have to be."""
    lines = [tuple(map(printable, line)) for line in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _end(why: str, code: int, *, as_json: bool) -> NoReturn:
    if as_json:
        say(json.dumps({"error": why}))
    else:
        say(f"Error: {why}", err=True)
    raise SystemExit(code)
