"""What all commands share: access to the application, common options, and how a command ends."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, NoReturn, TypeVar

import click
from flask import current_app

from flask_idempotency.assembly import Services, identities
from flask_idempotency.cli.output import say
from flask_idempotency.engine.capabilities import DataLoss, Recovery, SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.journal import EMPTY, Journal
from flask_idempotency.engine.keys import LONGEST_NAME, Identity
from flask_idempotency.engine.model import RequestInfo, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep, Settler
from flask_idempotency.operations.records import AuditNote, RecordView, shown
from flask_idempotency.operations.records import Refused as Refused
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import policy_of, settler_of, steps_of
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.recorded_steps import view_of

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


def state() -> Any:
    """Return the state of the application of this command: `extension.AppState`."""
    found = current_app.extensions.get("idempotency")
    if found is None:
        raise IdempotencyError("Idempotency is not set up on this application: call init_app first.")
    return found


def built() -> Services:
    """Return the engine, the codec and the store parts of the application."""
    parts: Services | None = state().built
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


def policy_for(about: RequestInfo) -> Policy:
    """Return the policy of the endpoint, inbox or task of this record."""
    return policy_of(policies(), state().loaders.operations, about)


def recovery() -> Recovery:
    """Return the part of the store that finds records by state."""
    found = built().recovery
    if found is None:
        raise Refused("The store of this application cannot be searched: it has no `recovery`.")
    return found


def settler() -> Settler:
    found = settler_of(built(), settings(), state().observers)
    if found is None:
        raise Refused("The store of this application lets only the worker end its claim: it has no `recovery`.")
    return found


def identity() -> Identity:
    """Return the identity under the newest secret."""
    return identities(settings())[0]


def publish(event: Event) -> None:
    """Publish an event to the observers of this application."""
    state().observers(event)


def tids_by_secret(tenant: str | None) -> list[tuple[bytes, ...]]:
    """Return the ids of the parts of this tenant: under every secret in use, the newest first, then under the former
    namespace."""
    former, namespaces = settings().former_identity, [settings().namespace]
    if former is not None and former.namespace not in (None, namespaces[0]):
        namespaces.append(former.namespace or "")
    return [who.tenant_ids(namespace, tenant) for namespace in namespaces for who in identities(settings())]


def every_tids(tenant: str | None) -> list[tuple[bytes, ...]]:
    """Return the same, and the ids before a change of identity. Other tenants may share these: use them with a token only."""
    former, own = settings().former_identity, tids_by_secret(tenant)
    if former is None:
        return own
    namespace, before = former.namespace or settings().namespace, None if former.tenant is False else tenant
    return own + [who.tenant_ids(namespace, before) for who in identities(settings())]


def tids(tenant: str | None) -> list[bytes]:
    """Return all ids of this tenant: of every part, under every secret in use."""
    return list(chain.from_iterable(tids_by_secret(tenant)))


def check_layout() -> None:
    """Raise `Refused` if the settings of this host look for a tenant where the store does not keep it."""
    memory = built().data_loss
    if memory is not None and DataLoss.FOREIGN.value in memory.status().losses:
        raise Refused(
            "This is not the Redis that IDEMPOTENCY_STORE_ID names, or it was set up with another IDEMPOTENCY_TENANT_SHARDS: "
            "most records of the tenant would be missed. Nothing was changed. See `flask idempotency redis status`."
        )


def pseudonym(tenant: str | None) -> str:
    """Return the pseudonym of this tenant in logs."""
    return "-" if tenant is None else identity().pseudonym(tenant)


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
    text = value.strip()
    if (parameter.required and not text) or not text.isprintable() or len(text) > LONGEST_NAME:
        raise click.BadParameter(f"must be one line of text, not longer than {LONGEST_NAME} characters.")
    return text


def show_of(found: SeenRecord, *, steps: bool = False) -> RecordView:
    """Return what an operator may know of this record. `steps`: with its recorded steps."""
    record, journal, seen = found.record, EMPTY, tuple[SeenStep, ...]()
    may_be_paused = record.state is State.PROCESSING and record.remaining <= 0
    if steps or may_be_paused:
        journal, seen = recorded_of(found)
    views = tuple(map(view_of, seen)) if steps else None
    return shown(found, policy_for(record.info), identity().label(found.key), journal=journal, steps=views)


def recorded_of(found: SeenRecord) -> tuple[Journal, tuple[SeenStep, ...]]:
    """Return the journal of this record and its steps. A completed record has none."""
    if found.record.state is State.COMPLETED:
        return EMPTY, ()
    return steps_of(built(), settings(), found)


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
