"""The commands that only read: `policy`, `list`, `show` and `stats`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, Final

import click
from flask import current_app

from flask_idempotency.assembly import Services
from flask_idempotency.cli import cli
from flask_idempotency.cli.context import (
    ago,
    as_json_option,
    built,
    chosen,
    clean,
    exit_on_error,
    paragraph,
    policies,
    recovery,
    say,
    settings,
    show_of,
    state,
    table,
    tenant_options,
    tids,
)
from flask_idempotency.cli.record_options import RecordOptions, find_record, naming_options
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import OnExpiry, State
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.operations.admin import Stats, stats
from flask_idempotency.operations.identity import IdentityChange, look
from flask_idempotency.operations.records import RecordFilter, RecordView, Refused, format_duration, listed
from flask_idempotency.web.janitor import shape_in
from flask_idempotency.web.policies import Policies, PolicySource

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that are never in scope."""

_BY_EFFECTS: Final = frozenset({"on_abandoned", "on_error"})
"""Options whose default comes from `effects`."""

_POLICY_HEAD = (
    "endpoint",
    "methods",
    "required",
    "effects",
    "on abandoned",
    "keep",
    "lease",
    "profile",
    "resolver",
    "",
)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """The methods of one endpoint that have one policy, for the same reasons."""

    endpoint: str
    methods: tuple[str, ...]
    explained: PolicySource
    resolver: bool

    @property
    def policy(self) -> Policy:
        return self.explained.resolved.policy


@cli.command("policy")
@click.argument("endpoint", required=False)
@as_json_option
def policy_command(endpoint: str | None, as_json: bool) -> None:
    """Show the policy of each endpoint. With an ENDPOINT, show every value and where it was written.

    Leaves out the methods that are never in scope: GET, HEAD, OPTIONS and TRACE. Changes nothing, and calls no store.
    """
    with exit_on_error(as_json=as_json):
        rules = policies()
        if endpoint is not None and endpoint not in {each for each, _ in rules.pairs()}:
            raise Refused("This application has no such endpoint: `flask idempotency policy` names them all.")
        rows = [row for row in _rows(rules) if endpoint in (None, row.endpoint)]
    if as_json:
        say(json.dumps({"endpoints": list(map(_as_object, rows))}))
    elif not rows:
        say("There is nothing in scope: only methods that are safe to repeat.")
    elif endpoint is None:
        say(table(_POLICY_HEAD, list(map(_as_line, rows))))
    else:
        say("\n\n".join(map(_policy_text, rows)))


def _rows(rules: Policies) -> Iterator[PolicyRow]:
    resolvers = state().loaders.resolvers
    grouped: dict[str, list[tuple[list[str], PolicySource]]] = {}
    for endpoint, method in rules.pairs():
        if method in SAFE:
            continue
        explained, groups = rules.explain(endpoint, method), grouped.setdefault(endpoint, [])
        alike = [methods for methods, known in groups if known == explained]
        if alike:
            alike[0].append(method)
        else:
            groups.append(([method], explained))
    for endpoint, groups in grouped.items():
        for methods, explained in groups:
            yield PolicyRow(endpoint, tuple(methods), explained, endpoint in resolvers)


def abandoned(policy: Policy) -> str:
    """Return what happens to a key whose worker vanished."""
    if policy.on_expiry is OnExpiry.QUARANTINE:
        return "quarantined"
    return "taken over, or quarantined past its point" if policy.effects == "marked" else "taken over"


def failed(policy: Policy) -> str:
    """Return what happens to a key whose view failed, by the default rules."""
    match policy.on_error:
        case "release":
            return "released"
        case "keep":
            return "kept with its response"
        case "quarantine":
            return "quarantined"
        case None:
            decision = policy.settled_as(None, past_point=False)
            by_default = "released" if decision is Decision.RELEASE else "quarantined"
            return f"{by_default}, or quarantined past its point" if policy.effects == "marked" else by_default


def _scope(row: PolicyRow) -> str:
    resolved = row.explained.resolved
    if resolved.faults:
        return "closed: " + " ".join(resolved.faults)
    if not resolved.chosen:
        return "not chosen (IDEMPOTENCY_GUARD)"
    return "exempt" if resolved.exempt else "claimed in the view" if resolved.deferred else ""


def _as_line(row: PolicyRow) -> tuple[str, ...]:
    policy = row.policy
    return (
        row.endpoint,
        ",".join(row.methods),
        "yes" if policy.required else "no",
        policy.effects,
        abandoned(policy),
        format_duration(policy.keep),
        format_duration(policy.lease),
        policy.profile,
        "yes" if row.resolver else "-",
        _scope(row),
    )


def _policy_text(row: PolicyRow) -> str:
    policy, origins = row.policy, row.explained.origins
    values = [
        (field.name, _spelled(field.name, getattr(policy, field.name)), origins[field.name]) for field in fields(Policy)
    ]
    resolver = "calls its resolver" if row.resolver else "has no resolver"
    facts = [
        f"a vanished worker's key is {abandoned(policy)}",
        f"a failed view's is {failed(policy)}",
        resolver,
        *filter(None, [_scope(row)]),
    ]
    return f"{printable(row.endpoint)} {','.join(row.methods)}: {'; '.join(facts)}\n" + table(
        ("value", "is", "from"), values
    )


def _as_object(row: PolicyRow) -> dict[str, object]:
    origins, resolved = row.explained.origins, row.explained.resolved
    values = {
        field.name: {"value": _plain(getattr(row.policy, field.name)), "from": origins[field.name]}
        for field in fields(Policy)
    }
    return {
        "endpoint": row.endpoint,
        "methods": list(row.methods),
        "exempt": resolved.exempt,
        "chosen": resolved.chosen,
        "deferred": resolved.deferred,
        "faults": list(resolved.faults),
        "resolver": row.resolver,
        "abandoned": row.policy.on_expiry.value,
        "failed": failed(row.policy),
        "policy": values,
    }


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    match value:
        case frozenset():
            return sorted(value)
        case tuple():
            return list(map(_plain, value))
        case _ if callable(value):
            return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        case _:
            return value


def _spelled(name: str, value: Any) -> str:
    match _plain(value):
        case None if name in _BY_EFFECTS:
            return "by effects"
        case None | []:
            return "-"
        case bool(said):
            return "yes" if said else "no"
        case float(number):
            return f"{number:g}"
        case [int(), *_] as statuses:
            return _ranges(statuses)
        case list(items):
            return ", ".join(": ".join(item) if isinstance(item, list) else str(item) for item in items)
        case other:
            return str(other)


def _ranges(numbers: list[int]) -> str:
    """Return 200, 201, 202, 404 as `200-202, 404`."""
    said: list[list[int]] = []
    for number in numbers:
        if said and number == said[-1][-1] + 1:
            said[-1].append(number)
        else:
            said.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in said)


# `flask idempotency list` and `show`

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


@cli.command("list")
@click.option("--state", "of_state", required=True, type=click.Choice([state.value for state in State]), help="Which.")
@tenant_options
@click.option(
    "--older-than",
    callback=_seconds,
    default="0",
    metavar="DURATION",
    help="First used longer ago than this: 90s, 15m, 2h, 3d.",
)
@click.option("--endpoint", metavar="E", help="Only this endpoint.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most this many records.")
@as_json_option
def list_command(
    of_state: str,
    tenant: str | None,
    no_tenant: bool,
    older_than: float,
    endpoint: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the records in a state, one line each, in no order. Of every tenant, unless you name one.

    By its handle `show`, `release` and `resolve` find it again. Changes nothing.
    """
    everybody = tenant is None and not no_tenant
    whose = None if everybody else chosen(tenant, no_tenant=no_tenant)
    with exit_on_error(as_json=as_json):
        wanted = RecordFilter(State(of_state), (None,) if everybody else tids(whose), older_than, endpoint)
        found = list(islice(listed(recovery(), wanted), limit + 1))
        shown = [show_of(each) for each in found[:limit]]
    more = len(found) > limit
    if as_json:
        say(json.dumps({"records": [asdict(each) for each in shown], "more": more}))
    elif not shown:
        say("No record matches.")
    else:
        say(table(_RECORD_HEAD, [_line(each) for each in shown]))
        if more:
            say(f"There are more than {limit}: see --limit, --older-than and --endpoint.", err=True)


@cli.command("show")
@naming_options
@as_json_option
def show_command(named: RecordOptions, as_json: bool) -> None:
    """Show one record, without the body of its response. Changes nothing.

    Name it by its HANDLE (see `list`), by the id that a log line has as `record`, or by --key as the client knows it. A key
    that is typed stays in the history of the shell, and others see it while the command runs: with --key - it is read from
    standard input.
    """
    with exit_on_error(as_json=as_json):
        case = find_record(named, whole=False)
        shown = show_of(case.first)
    if as_json:
        say(json.dumps({**asdict(shown), "also": list(case.also)}))
    else:
        also = [f"also under:   {handle}" for handle in case.also]
        say("\n".join([paragraph(shown), *also]))


def _line(view: RecordView) -> tuple[str, ...]:
    return (
        view.handle,
        view.state,
        clean(view.endpoint),
        view.method,
        clean(view.tenant),
        clean(view.principal),
        str(view.attempt),
        ago(view.first_used_ago),
        ago(view.lease_ended_ago),
        "-" if view.owner is None else f"{format_duration(view.owner.last_seen_ago)} ago",
        clean(view.reason),
    )


# `flask idempotency stats`


@cli.command("stats")
@click.option("--quick", is_flag=True, help="Leave out the completed records: counting those may take long.")
@as_json_option
def stats_command(quick: bool, as_json: bool) -> None:
    """Show how many records there are in each state, and when each janitor task last ran. Changes nothing."""
    with exit_on_error(as_json=as_json):
        found, parts = recovery(), built()
        if not quick and sys.stderr.isatty():
            say("Counting the completed records; --quick leaves them out.", err=True)
        shown = stats(
            found,
            responses=None if quick else parts.responses,
            data_keys=parts.data_keys,
            ledger=parts.ledger,
            tasks=parts.tasks,
            identity=_identity(parts),
        )
    say(json.dumps(asdict(shown)) if as_json else "\n".join(_stats_text(shown, quick=quick)))


def _stats_text(shown: Stats, *, quick: bool) -> list[str]:
    lines = [
        *_unfinished(shown.standing),
        _count("completed", shown.completed, "not counted" if quick else "not known"),
    ]
    lines += [_count("data keys", shown.data_keys), _count("tenants with a ledger", shown.tenants)]
    lines += [clean(f"identity: {each.text} {each.remedy}") for each in shown.identity or ()]
    if shown.tasks is None:
        return [*lines, "This store keeps no task log, so it is unknown whether a janitor runs."]
    if not shown.tasks:
        return [*lines, "No janitor task has ever reported: is there a janitor, or a cron job?"]
    return [
        *lines,
        *(f"{clean(task)}: {format_duration(run.ago)} ago{_did(run.did)}" for task, run in sorted(shown.tasks.items())),
    ]


def _identity(parts: Services) -> tuple[IdentityChange, ...] | None:
    if parts.shared_task_log is None:
        return None
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    return look(parts.shared_task_log, shape_in(app, settings(), state().loaders, policies()), note=False).changes


def _unfinished(counts: UnfinishedCounts) -> list[str]:
    return [
        _count("in flight", counts.in_flight),
        _count("lapsed", counts.lapsed) + _since(counts.lapsed_for),
        _count("quarantined", counts.quarantined) + _since(counts.quarantined_for),
    ]


def _count(name: str, count: int | None, otherwise: str = "not known") -> str:
    return f"{name}: {otherwise if count is None else count}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {format_duration(seconds)}"


def _did(did: Mapping[str, Any]) -> str:
    """Return the counts of a report that are not 0, escaped: a report comes from a store."""
    counts = [
        f"{clean(str(name)).replace('_', ' ')} {clean(str(count))}"
        for name, count in did.items()
        if count and name not in ("finished", "seconds")
    ]
    unfinished = ["not finished"] if did.get("finished") is False else []
    said = ", ".join([*counts, *unfinished])
    return f": {said}" if said else ""
