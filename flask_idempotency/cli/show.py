"""The commands that show policies and records: `policy`, `list` and `show`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any, Final

import click

from flask_idempotency.cli import cli, record_options
from flask_idempotency.cli.context import Output, chosen, duration, instant, prints_json, tenant_options, wide_option
from flask_idempotency.cli.output import Cell, Line, Styled, ago, clean, facts, facts_of, short_name, state_of, table
from flask_idempotency.engine.audit import SAYS
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import State
from flask_idempotency.engine.operations import Operation
from flask_idempotency.operations.browse import CONDITIONS, UNFINISHED, Browsing, listing, resolver_of
from flask_idempotency.operations.records import Condition, RecordView, Refused
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.web import client_keys, operator, policy_table
from flask_idempotency.web.recorded_steps import downstream_key

_RARE_OF_POLICIES: Final = ("keep", "lease", "max runtime", "profile", "resolver")
_OFTEN_EMPTY: Final = ("form field", "waits")
_RARE_OF_RECORDS: Final = ("status", "completed", "principal", "attempt", "owner seen", "reason")
"""The columns that only a wide table has."""


@cli.command("policy")
@click.argument("endpoint", required=False, shell_complete=record_options.complete_endpoint)
@wide_option
def policy_command(endpoint: str | None, wide: bool) -> Output:
    """Show the policy of each endpoint and inbox, or all values of one.

    With an ENDPOINT, the command shows every value and where it was written. An inbox is named as in its
    records: inbox:billing. Changes nothing, and calls no store.

    \b
    Example:
      $ flask idempotency policy
    """
    rules = operator.policies()
    inboxes = [each for each in policy_table.consumers() if endpoint in (None, each.name)]
    if endpoint is not None and not inboxes and endpoint not in {each for each, _ in rules.pairs()}:
        raise Refused(client_keys.UNKNOWN_ENDPOINT)
    rows = [row for row in policy_table.policy_rows(rules) if endpoint in (None, row.endpoint)]
    if endpoint is None:
        rare: Collection[str] = () if wide else _RARE_OF_POLICIES
        # Most applications have neither a form nor an endpoint that waits.
        rare = {*rare, *(name for name in _OFTEN_EMPTY if all(_as_line(row)[name] == "-" for row in rows))}
        parts = [table(map(_as_line, rows), without=rare), table(map(_consumer_line, inboxes), without=rare)]
    else:
        parts = [_policy_lines(row) for row in rows]
        for each in inboxes:
            values = policy_table.consumer_values(each).items()
            gone = f"{printable(each.name)}: a vanished worker's key is {policy_table.abandoned(each.policy)}"
            parts.append([gone, *table({"value": n, "is": policy_table.spelled(n, value)} for n, value in values)])
    lines = [line for part in parts if part for line in ("", *part)][1:]
    messages = [
        {
            "operation": each.name,
            "resolver": each.name in operator.state().loaders.resolvers,
            "abandoned": each.policy.on_expiry.value,
            "policy": {
                name: policy_table.plain_value(value) for name, value in policy_table.consumer_values(each).items()
            },
        }
        for each in inboxes
    ]
    shown = {"endpoints": list(map(_as_object, rows)), "messages": messages}
    return Output(shown, lines or ["No method is in scope: each of them is safe to repeat."])


def _consumer_line(each: Operation) -> dict[str, str]:
    policy, values = each.policy, policy_table.consumer_values(each)
    return {
        "messages": each.name,
        "effects": policy.effects,
        "on abandoned": policy_table.abandoned(policy),
        "attempts": str(values["max_attempts"]),
        "keep": format_duration(policy.keep),
        "lease": format_duration(policy.lease),
        "max runtime": format_duration(policy.max_runtime),
        "resolver": "yes" if each.name in operator.state().loaders.resolvers else "-",
    }


def _as_line(row: policy_table.PolicyRow) -> dict[str, str]:
    policy, resolved = row.policy, row.explained.resolved
    guarded = resolved.chosen and not resolved.exempt
    return {
        "endpoint": row.endpoint,
        "methods": ",".join(row.methods),
        "required": "yes" if policy.required else "no",
        "effects": policy.effects,
        "on abandoned": policy_table.abandoned(policy) if guarded and policy.mode == "enforce" else "-",
        "form field": policy.form_field or "-",
        "waits": format_duration(policy.wait) if policy.in_flight == "wait" else "-",
        "keep": format_duration(policy.keep),
        "lease": format_duration(policy.lease),
        "profile": policy.profile,
        "resolver": "yes" if row.resolver else "-",
        "": policy_table.scope_of(row),
    }


def _policy_lines(row: policy_table.PolicyRow) -> list[Line]:
    policy = row.policy
    values = (
        {"value": name, "is": policy_table.spelled(name, value), "from": origin}
        for name, value, origin in policy_table.written(row.explained)
    )
    said = [
        "not protected, and under enforce" if row.explained.resolved.observed else "",
        f"a vanished worker's key is {policy_table.abandoned(policy)}",
        f"a failed view's is {policy_table.failed(policy)}",
        "calls its resolver" if row.resolver else "has no resolver",
        policy_table.scope_of(row),
    ]
    return [f"{printable(row.endpoint)} {','.join(row.methods)}: {'; '.join(filter(None, said))}", *table(values)]


def _as_object(row: policy_table.PolicyRow) -> dict[str, object]:
    resolved, written = row.explained.resolved, policy_table.written(row.explained)
    return {
        "endpoint": row.endpoint,
        "methods": list(row.methods),
        "exempt": resolved.exempt,
        "chosen": resolved.chosen,
        "deferred": resolved.deferred,
        "faults": list(resolved.faults),
        "resolver": row.resolver,
        "abandoned": row.policy.on_expiry.value,
        "failed": policy_table.failed(row.policy),
        "policy": {name: {"value": policy_table.plain_value(value), "from": origin} for name, value, origin in written},
    }


# `flask idempotency list` and `show`

_STATES: Final = {
    **{each.value.replace(" ", "-"): frozenset({each}) for each in Condition},
    State.PROCESSING.value: CONDITIONS[State.PROCESSING],
}
"""What `--state` takes, with the states that an operator sees."""


@cli.command("list")
@click.option(
    "--state",
    "of_state",
    type=click.Choice(list(_STATES)),
    help="Only records in this state, as the list and `stats` name it. `processing`: those in flight, paused, or with an "
    "expired lease.",
)
@tenant_options
@click.option(
    "--older-than",
    callback=duration,
    default="0",
    metavar="DURATION",
    help="First used longer ago than this: 90s, 15m, 2h, 3d.",
)
@record_options.endpoint_option(help="Only this endpoint.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most this many records.")
@click.option(
    "--from", "since", callback=instant, metavar="TIME", help="First used then or later: 2026-01-15T09:30, in UTC."
)
@click.option("--to", "until", callback=instant, metavar="TIME", help="First used before then.")
@click.option("--newest", is_flag=True, help="The last used first.")
@wide_option
def list_command(
    of_state: str | None, tenant: str | None, no_tenant: bool, limit: int, wide: bool, **options: Any
) -> Output:
    """List the unfinished records, one line each.

    Quarantined ones come first, then those whose lease expired, then those in flight, the oldest first. Completed records
    need --state, and come in no order without --newest. The list has the records of every tenant, unless you name one.
    `show`, `release` and `resolve` take the id of a record. Changes nothing.

    \b
    Example:
      $ flask idempotency list --older-than 15m
    """
    everybody = tenant is None and not no_tenant
    whose = None if everybody else chosen(tenant, no_tenant=no_tenant)
    conditions = UNFINISHED if of_state is None else _STATES[of_state]
    # Only a journal tells a paused request from one whose lease expired.
    journals = operator.built().journals if len({Condition.PAUSED, Condition.LEASE_EXPIRED} & conditions) == 1 else None
    if conditions == {Condition.PAUSED} and journals is None:
        raise Refused("The store of this application keeps no steps, so no request of it is paused.")
    # The other options are fields of the filter.
    wanted = Browsing(conditions, (None,) if everybody else operator.tids(whose), **options)
    found = listing(operator.recovery(), wanted, limit=limit, journals=journals)
    views = [operator.show_of(each) for each in found.found]
    none = "No record matches." if of_state else "No record is unfinished. Completed ones: --state completed."
    lines = table((_line(each, found.ids[each.handle]) for each in views), without=() if wide else _RARE_OF_RECORDS)
    count = "More records match" if found.more is None else f"{found.more:,} more"
    notes = [f"{count}: see --limit, --older-than and --endpoint."] if found.more != 0 and not prints_json() else []
    shown = {"records": [asdict(each) for each in views], "more": found.more != 0}
    return Output(shown, lines or [none], notes=notes)


@cli.command("show")
@record_options.naming_options
@click.option(
    "--downstream", metavar="NAME", help="Show the key that `current_claim.downstream_key(NAME)` gave the view too."
)
@click.option("--item", metavar="ITEM", help="With --downstream: the item of the step, as this command prints it.")
def show_command(named: record_options.RecordOptions, downstream: str | None, item: str | None) -> Output:
    """Show one record, without the body of its response.

    Changes nothing. It lists the recorded steps of the request too, without their results, and who changed the record and
    why. Name the record by the start of its ID (see `list`), by the id that a log line has as `record`, or by --key as the
    client knows it. A key that you type stays in the history of the shell, and other users see it while the command runs.

    \b
    Example:
      $ flask idempotency show --key order-17 --tenant acme --principal alice
    """
    if item is not None and downstream is None:
        raise click.UsageError("--item goes with --downstream.")
    case = record_options.find_record(named, whole=False)
    shown = operator.show_of(case.first, steps=True)
    audit = operator.built().audit
    changes = [] if audit is None else [each for each in audit.entries(case.first.key) if each.verb not in SAYS]
    said = resolver_of(audit, case.first, operator.policy_for(case.first.record.info))
    found: dict[str, Any] = {
        **asdict(shown),
        "also": list(case.also),
        "changes": None
        if audit is None
        else [{**asdict(each), "at": moment(each.at), "step": each.step or None} for each in changes],
        "resolver": None if said is None else asdict(said),
    }
    more = [] if said is None else [("unresolved", said.text)]
    more += [("also under", handle) for handle in case.also]
    if downstream is not None:
        found["downstream_key"] = _downstream_key(case.first, downstream, item)
        more.append(("downstream", found["downstream_key"]))
    return Output(found, [*facts_of(shown, changes), *facts(more)])


def _downstream_key(found: SeenRecord, name: str, item: str | None) -> str:
    """Return the key of this step, or of any name. Raises `Refused` rather than show a key that no call has sent."""
    policy = operator.policy_for(found.record.info)
    name = policy.recorded_as(name)
    recorded, met = record_options.steps_named(operator.recorded_of(found)[1], policy, name, item)
    if (recorded or item is not None) and len(met) != 1:
        what = "is recorded for items" if recorded and item is None else "is not recorded with this item"
        raise Refused(f"The step {printable(name)} {what}. Give --item as `show` prints it.")
    try:
        if met:
            return met[0].downstream_key
        return downstream_key(operator.settings(), found, name)
    except ConfigurationError:
        raise Refused(
            "The downstream key of this record is unknown: the key was claimed by another application, under a secret that "
            "is not listed any more, or while IDEMPOTENCY_SECRET or the identity of callers changed. Find the call by other "
            "data."
        ) from None


def _line(view: RecordView, id: str) -> dict[str, Cell]:
    return {
        "id": id,
        "state": _marked(view),
        "request": f"{clean(view.method)} {clean(view.endpoint)}",
        "tenant": short_name(view.tenant),
        "first used": ago(view.first_used_ago, units=1),
        "lease": _lease(view),
        "status": "-" if view.answer is None else str(view.answer.status),
        "completed": view.completed_at or "-",
        "principal": short_name(view.principal),
        "attempt": str(view.attempt),
        "owner seen": ago(None if view.owner is None else view.owner.last_seen_ago, units=1),
        "reason": clean(view.reason),
    }


def _marked(view: RecordView) -> Styled:
    """Return the state, and for a completed record whether it is one of a voided key, or whose response is gone."""
    state, completed = state_of(view), view.condition is Condition.COMPLETED
    over = completed and view.remembered_until is not None and view.answer is None
    mark = "voided" if completed and view.reason == "voided" else "remembered" if over else ""
    return Styled(f"{state.text}, {mark}", state.style) if mark else state


def _lease(view: RecordView) -> str:
    if view.lease_left is not None and view.condition is Condition.IN_FLIGHT:
        return f"{format_duration(view.lease_left, units=1)} left"
    return "-" if view.lease_ended_ago is None else f"ended {ago(view.lease_ended_ago, units=1)}"
