"""`flask idempotency list` and `show`: what an auditor may know of records, and never a body."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import islice

import click
from flask.cli import with_appcontext

from flask_idempotency.engine.model import State
from flask_idempotency.operations import Shown, Wanted, listed
from flask_idempotency.operations.records import span
from flask_idempotency.web.cli.group import as_json_option, giving_up, say, table, tids, unsettled
from flask_idempotency.web.cli.naming import Named, case_of, naming_options
from flask_idempotency.web.cli.telling import ago, clean, paragraph, show_of
from flask_idempotency.web.cli.tenant import chosen, tenant_options

_RECORD_HEAD = (
    "handle",
    "state",
    "endpoint",
    "method",
    "tenant",
    "principal",
    "attempt",
    "first used",
    "lease ended",
    "owner seen",
    "reason",
)


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter("must be a number of seconds, or one with a unit: 90s, 15m, 2h, 3d.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@click.command("list")
@click.option("--state", "of_state", required=True, type=click.Choice([state.value for state in State]), help="Which.")
@tenant_options
@click.option(
    "--older-than", callback=_seconds, default="0", metavar="DURATION", help="First used before that: 90s, 15m, 2h, 3d."
)
@click.option("--endpoint", metavar="E", help="Of this endpoint only.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Not more than so many.")
@as_json_option
@with_appcontext
def list_command(
    of_state: str,
    tenant: str | None,
    no_tenant: bool,
    older_than: float,
    endpoint: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """One line for each record in a state, of everybody unless a tenant is named, in no particular order.

    By its handle `show`, `release` and `resolve` find it again. Changes nothing.
    """
    everybody = tenant is None and not no_tenant
    whose = None if everybody else chosen(tenant, no_tenant=no_tenant)
    with giving_up(as_json=as_json):
        wanted = Wanted(State(of_state), (None,) if everybody else tids(whose), older_than, endpoint)
        found = list(islice(listed(unsettled(), wanted), limit + 1))
        told = [show_of(each) for each in found[:limit]]
    more = len(found) > limit
    if as_json:
        say(json.dumps({"records": [asdict(each) for each in told], "more": more}))
    elif not told:
        say("There are none.")
    else:
        say(table(_RECORD_HEAD, [_line(each) for each in told]))
        if more:
            say(f"There are more than {limit}: see --limit, --older-than and --endpoint.", err=True)


@click.command("show")
@naming_options
@as_json_option
@with_appcontext
def show_command(named: Named, as_json: bool) -> None:
    """Everything that an auditor is told of one record, and never its answer's body. Changes nothing.

    Name it by its HANDLE (see `list`), by the id that a log line has as `record`, or by --key as the client knows it. A key
    that is typed stays in the history of the shell, and others see it while the command runs: with --key - it is read from
    standard input.
    """
    with giving_up(as_json=as_json):
        case = case_of(named, whole=False)
        told = show_of(case.first)
    if as_json:
        say(json.dumps({**asdict(told), "also": list(case.also)}))
    else:
        also = [f"also under:   {handle}" for handle in case.also]
        say("\n".join([paragraph(told), *also]))


def _line(told: Shown) -> tuple[str, ...]:
    return (
        told.handle,
        told.state,
        clean(told.endpoint),
        told.method,
        clean(told.tenant),
        clean(told.principal),
        str(told.attempt),
        ago(told.first_used_ago),
        ago(told.lease_ended_ago),
        "-" if told.owner is None else f"{span(told.owner.last_seen_ago)} ago",
        clean(told.reason),
    )
