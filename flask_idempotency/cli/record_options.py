"""Find the record that a command names: by the start of its handle, by its id from a log, or by the client's key.

And complete the name of its endpoint in a shell: click completes commands, options and choices by itself.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from typing import Any, Final

import click
from flask import current_app
from flask.cli import ScriptInfo

from flask_idempotency.assembly import identities
from flask_idempotency.cli.context import tenant_options
from flask_idempotency.cli.output import clean
from flask_idempotency.engine.model import State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep
from flask_idempotency.operations import records
from flask_idempotency.operations.records import Case, Refused
from flask_idempotency.web import operator
from flask_idempotency.web.client_keys import parsed_key, uses_of
from flask_idempotency.web.policies import SAFE
from flask_idempotency.web.principals import identifies


def complete_endpoint(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the endpoints in scope, inboxes and tasks that begin with this text. Empty if the application cannot be loaded.

    Print no error and call no store: the person at the terminal has not run a command yet.
    """
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


STDIN: Final = "-"
endpoint_option: Final = partial(click.option, "--endpoint", metavar="E", shell_complete=complete_endpoint)


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """The options that name a record. Never print them: they may hold a client's key."""

    handle: str | None = field(repr=False)
    key: str | None = field(repr=False)
    principal: str | None = field(repr=False)
    anonymous: bool
    tenant: str | None = field(repr=False)
    no_tenant: bool
    endpoint: str | None

    @property
    def whose(self) -> str | None:
        """The tenant. Required if the application has a tenant_loader."""
        if self.tenant == "" or (self.tenant is not None and self.no_tenant):
            raise click.UsageError("Name the tenant: --tenant T, or --no-tenant.")
        if self.tenant is None and not self.no_tenant and operator.state().loaders.tenant is not None:
            raise click.UsageError("This application has a tenant_loader. Name the tenant: --tenant T, or --no-tenant.")
        return self.tenant

    @property
    def who(self) -> str | None:
        """The principal. Required if the application names principals."""
        if self.principal == "" or (self.principal is not None and self.anonymous):
            raise click.UsageError("Name the principal: --principal P, or --anonymous.")
        known = operator.state().loaders.principal is not None or identifies(current_app)
        if self.principal is None and not self.anonymous and known:
            raise click.UsageError(
                "This application has principals. Name the one that sent the key: --principal P, or --anonymous."
            )
        return self.principal


def naming_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ID and `--key` with its scope. The command receives them as `named`."""

    @click.argument("handle", metavar="[ID]", required=False)
    @click.option("--key", metavar="KEY", help="The client's key; - reads it from standard input.")
    @click.option("--principal", metavar="P", help="The principal that sent the key, as the principal_loader names it.")
    @click.option("--anonymous", is_flag=True, help="The client sent the key without a principal.")
    @endpoint_option(help="The endpoint that the key was used for.")
    @tenant_options
    @wraps(command)
    def named(*args: Any, **options: Any) -> Any:
        typed = {name: options.pop(name) for name in RecordOptions.__dataclass_fields__}
        return command(*args, named=RecordOptions(**typed), **options)

    return named


def steps_named(
    steps: Sequence[SeenStep], policy: Policy, name: str, item: str | None
) -> tuple[list[SeenStep], list[SeenStep]]:
    """Return the recorded steps of this name, and those of them with this item."""
    named = [step for step in steps if step.name == policy.recorded_as(name)]
    return named, [step for step in named if item == (None if step.item is None else str(step.item))]


def find_record(named: RecordOptions, *, whole: bool) -> Case:
    """Return the use of a key that the options name. Raises `Refused` if there is none, or if there are several.

    `whole`: with its records under every secret, because the command will resolve them.
    """
    if (named.handle is None) == (named.key is None):
        raise click.UsageError("Name one record: by the start of its ID, by its id from a log, or by --key.")
    searched = operator.recovery()
    if named.key is not None:
        of_message = operator.state().loaders.operations.get(named.endpoint or "") is not None
        # A message has no principal, so the command needs none for it.
        whose, who = named.whose, None if of_message else named.who
        case = _one(uses_of(_typed_key(named.key), tenant=whose, principal=who, endpoint=named.endpoint), named)
        former = operator.settings().former_identity
        told = former is None or not (callable(former.tenant) or former.principal)
        if not whole or told or case.first.record.state is State.COMPLETED:
            return case
        # Only a request can tell the former name, and no command has one. The record under it has the same token.
        return records.with_rotated(case, searched, operator.read, operator.every_tids(named.whose))
    if named.principal is not None or named.anonymous or named.endpoint is not None:
        raise click.UsageError("--principal, --anonymous and --endpoint go with --key.")
    handle = (named.handle or "").lower()
    if records.SHORT.fullmatch(handle):
        if whole and len(handle) < records.SHOWN:
            # A typed start outlives its record: a few characters may begin the id of another one by then.
            raise Refused(
                f"{len(handle)} characters of an id are enough to read a record, and {records.SHOWN} to change one. Copy the "
                "id as `flask idempotency list` prints it."
            )
        anyone = named.tenant is None and not named.no_tenant
        concerned = [None] if anyone else list(chain.from_iterable(operator.every_tids(named.whose)))
        handle = records.by_short(searched, identities(operator.settings()), handle, tids=concerned)
    case = records.by_handle(operator.read, handle)
    if whole:
        operator.check_own(case.first.record)
    if named.tenant is not None or named.no_tenant:
        theirs = operator.every_tids(named.whose)
        about = case.first.record.info.tenant
        if not any(case.first.key.tid in parts for parts in theirs) or not operator.is_spelled(about, named.whose):
            raise Refused("This record belongs to another tenant.")
    else:
        theirs = operator.every_tids(case.first.record.info.tenant or None)
    return records.with_rotated(case, searched, operator.read, theirs) if whole else case


def _typed_key(typed: str) -> str:
    """Return the key that was typed, or that standard input holds."""
    if typed != STDIN:
        return typed
    ask = sys.stdin.isatty()
    return str(click.prompt("Key", hide_input=True, err=True)) if ask else sys.stdin.readline().rstrip("\r\n")


def client_key(typed: str) -> str:
    """Return the key that was typed. Raises `Refused` for one that no request could have."""
    return parsed_key(_typed_key(typed))


def _one(cases: list[Case], named: RecordOptions) -> Case:
    meant = [case for case in cases if named.endpoint in (None, case.first.record.info.operation)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        each = "; ".join(
            f"{clean(case.first.record.info.operation)}: {records.handle_of(case.first.key)}" for case in meant
        )
        raise Refused(f"This key was used for several endpoints. Add --endpoint, or name one record by its id: {each}.")
    if cases:
        other = clean(cases[0].first.record.info.operation)
        raise Refused(f"This key was used for another endpoint, {other}: name that one, or leave --endpoint out.")
    raise Refused(
        "There is no record of this key under any secret in use. It was never used, was released, or expired; or it belongs "
        "to another caller: check --tenant and --principal."
    )
