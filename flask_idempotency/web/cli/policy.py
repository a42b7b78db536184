"""`flask idempotency policy`: which policy applies to which endpoint, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import click
from flask.cli import with_appcontext

from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import OnLapse
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.operations.records import Refused, span
from flask_idempotency.web.cli.group import as_json_option, giving_up, policies, say, state, table
from flask_idempotency.web.policies import Explained, Policies

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Never in scope, whatever a policy says."""

_BY_EFFECTS: Final = frozenset({"on_abandoned", "on_error"})
"""Where no value is one: then `effects` decide."""

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
class Row:
    """The methods of one endpoint that have one policy, for the same reasons."""

    endpoint: str
    methods: tuple[str, ...]
    explained: Explained
    resolver: bool

    @property
    def policy(self) -> Policy:
        return self.explained.resolved.policy


@click.command("policy")
@click.argument("endpoint", required=False)
@as_json_option
@with_appcontext
def policy_command(endpoint: str | None, as_json: bool) -> None:
    """Which policy applies to which endpoint; with an ENDPOINT, every value and where it was written.

    Leaves out the methods that are never in scope: GET, HEAD, OPTIONS and TRACE. Changes nothing, and asks no store.
    """
    with giving_up(as_json=as_json):
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


def _rows(rules: Policies) -> Iterator[Row]:
    resolvers = state().loaders.resolvers
    grouped: dict[str, list[tuple[list[str], Explained]]] = {}
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
            yield Row(endpoint, tuple(methods), explained, endpoint in resolvers)


def abandoned(policy: Policy) -> str:
    """What becomes of a key whose worker has vanished."""
    if policy.on_lapse is OnLapse.QUARANTINE:
        return "quarantined"
    return "taken over, or quarantined past its point" if policy.effects == "marked" else "taken over"


def failed(policy: Policy) -> str:
    """What becomes of a key whose view has failed, by the default rules."""
    match policy.on_error:
        case "release":
            return "released"
        case "keep":
            return "kept with its answer"
        case "quarantine":
            return "quarantined"
        case None:
            decision = policy.settled_as(None, past_point=False)
            by_default = "released" if decision is Decision.RELEASE else "quarantined"
            return f"{by_default}, or quarantined past its point" if policy.effects == "marked" else by_default


def _scope(row: Row) -> str:
    resolved = row.explained.resolved
    if resolved.faults:
        return "closed: " + " ".join(resolved.faults)
    if not resolved.chosen:
        return "not chosen (IDEMPOTENCY_GUARD)"
    return "exempt" if resolved.exempt else "claimed in the view" if resolved.deferred else ""


def _as_line(row: Row) -> tuple[str, ...]:
    policy = row.policy
    return (
        row.endpoint,
        ",".join(row.methods),
        "yes" if policy.required else "no",
        policy.effects,
        abandoned(policy),
        span(policy.keep),
        span(policy.lease),
        policy.profile,
        "yes" if row.resolver else "-",
        _scope(row),
    )


def _policy_text(row: Row) -> str:
    policy, origins = row.policy, row.explained.origins
    values = [
        (field.name, _spelled(field.name, getattr(policy, field.name)), origins[field.name]) for field in fields(Policy)
    ]
    resolver = "asks its resolver" if row.resolver else "has no resolver"
    facts = [
        f"a vanished worker's key is {abandoned(policy)}",
        f"a failed view's is {failed(policy)}",
        resolver,
        *filter(None, [_scope(row)]),
    ]
    return f"{printable(row.endpoint)} {','.join(row.methods)}: {'; '.join(facts)}\n" + table(
        ("value", "is", "from"), values
    )


def _as_object(row: Row) -> dict[str, object]:
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
        "abandoned": row.policy.on_lapse.value,
        "failed": failed(row.policy),
        "policy": values,
    }


def _plain(value: Any) -> Any:
    """What JSON can hold."""
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
    """200, 201, 202, 404 as `200-202, 404`."""
    said: list[list[int]] = []
    for number in numbers:
        if said and number == said[-1][-1] + 1:
            said[-1].append(number)
        else:
            said.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in said)
