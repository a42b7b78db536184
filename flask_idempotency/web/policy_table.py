"""List the policy of each endpoint, inbox and task in words, for the command `policy` and the console."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.operations import Operation, Operations
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.operations.report import Report, Suggestion, suggestions
from flask_idempotency.settings.consumers import CONSUMER
from flask_idempotency.web.operator import built, policies, state
from flask_idempotency.web.policies import SAFE, Policies, PolicySource

_BY_EFFECTS: Final = frozenset({"on_abandoned", "on_error"})
"""Options whose default comes from `effects`."""

_HAS_POINT: Final = frozenset({"marked", "transactional"})
"""Effects under which a view may pass a point of no return. A transactional view that commits by itself passes it too."""


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


def consumers() -> list[Operation]:
    """Return the inboxes and tasks of this application, by name."""
    operations: Operations = state().loaders.operations
    return [each for name in operations.names() if (each := operations.get(name)) is not None]


def consumer_values(each: Operation) -> dict[str, object]:
    """Return the policy keywords of an inbox or a task."""
    values = {name: getattr(each.policy, name) for name in CONSUMER}
    return {**values, "in_flight": "later" if each.policy.in_flight == "reject" else "wait"}


def written(source: PolicySource) -> list[tuple[str, Any, str]]:
    """Return each value of the policy of an endpoint, and where it was written."""
    policy = source.resolved.policy
    return [(each.name, getattr(policy, each.name), source.origins[each.name]) for each in fields(Policy)]


def policy_rows(rules: Policies) -> Iterator[PolicyRow]:
    """Yield the policies of every endpoint. Safe methods are never in scope, and are left out."""
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
    if policy.steps or policy.dropped_steps:
        return "taken over, or quarantined in a plain step"
    return "taken over, or quarantined past its point" if policy.effects in _HAS_POINT else "taken over"


def failed(policy: Policy) -> str:
    """Return what happens to a key whose view failed, by the default rules."""
    match policy.on_error:
        case "release":
            return _released(policy)
        case "keep":
            return "kept with its response"
        case "quarantine":
            return "quarantined"
        case None:
            decision = policy.settled_as(None, past_point=False)
            by_default = _released(policy) if decision is Decision.RELEASE else "quarantined"
            return f"{by_default}, or quarantined past its point" if policy.effects in _HAS_POINT else by_default


def _released(policy: Policy) -> str:
    has_steps = policy.steps or policy.dropped_steps
    return "paused between its steps, or quarantined with one in doubt" if has_steps else "released"


def scope_of(row: PolicyRow) -> str:
    """Return why this policy does not apply as it stands. Empty: it does."""
    resolved = row.explained.resolved
    if resolved.faults:
        return "closed: " + " ".join(resolved.faults)
    if not resolved.chosen:
        return "not chosen (IDEMPOTENCY_GUARD)"
    if resolved.observed:
        return f"only observed (mode {resolved.policy.mode})"
    return "exempt" if resolved.exempt else "claimed in the view" if resolved.deferred else ""


def plain_value(value: Any) -> Any:
    """Return a value that JSON can hold."""
    match value:
        case frozenset():
            return sorted(value)
        case tuple():
            return list(map(plain_value, value))
        case Step():
            return value.name if value.effects == "plain" else f"{value.name} ({value.effects})"
        case _ if callable(value):
            return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        case _:
            return value


def spelled(name: str, value: Any) -> str:
    """Return a value of a policy in words."""
    match plain_value(value):
        case None if name in _BY_EFFECTS:
            return "by effects"
        case None if name in ("remember", "resume_within"):
            return "as keep"
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


def suggested(found: Report) -> tuple[dict[str, Policy], dict[str, list[Suggestion]]]:
    """Return the first policy of each endpoint that is in scope, and what the report suggests for those it names."""
    rules, joint = policies(), built().engine.transactions is not None
    known: dict[str, Policy] = {}
    for endpoint, method in rules.pairs():
        resolved = rules.resolve(endpoint, method)
        if not resolved.exempt:
            known.setdefault(endpoint, resolved.policy)
    return known, {
        name: suggestions(each, known[name], joint=joint) for name, each in found.endpoints.items() if name in known
    }
