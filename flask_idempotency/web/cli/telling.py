"""How records are written for people, on a terminal that believes what it is sent."""

from __future__ import annotations

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import State
from flask_idempotency.operations import Shown, shown
from flask_idempotency.operations.records import span
from flask_idempotency.web.cli.group import identity, policies
from flask_idempotency.web.resolvers import policy_of


def clean(text: str | None) -> str:
    """This text without anything that a terminal would take for a command. Names come from outside."""
    return "-" if text is None else printable(text) or "-"


def ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{span(seconds)} ago"


def show_of(found: Found) -> Shown:
    """What may be told of this record."""
    return shown(found, policy_of(policies(), found.record.about), identity().label(found.key))


def paragraph(told: Shown) -> str:
    """One record, a line for each thing that there is to say."""
    lines = [
        ("handle", told.handle),
        ("in logs", told.record),
        ("state", told.state + (f" ({clean(told.reason)})" if told.reason else "")),
        ("request", f"{clean(told.method)} {clean(told.endpoint)}"),
        ("tenant", clean(told.tenant)),
        ("principal", clean(told.principal)),
        ("attempt", f"{told.attempt} (fence {told.fence})"),
        ("first used", f"{told.requested_at}, {ago(told.first_used_ago)}"),
        *_owner(told),
        *_answer(told),
    ]
    return "\n".join(f"{name + ':':<13} {text}" for name, text in lines)


def _owner(told: Shown) -> list[tuple[str, str]]:
    if told.owner is None:
        return []
    lease = "not over yet" if told.lease_ended_ago is None else f"ended {ago(told.lease_ended_ago)}"
    lives = f"may be at work for another {span(told.owner.may_live_for)}" if told.owner.may_live_for else "not at work"
    then = "; then taken over by a retry" if told.on_lapse == "takeover" else "; then quarantined"
    return [
        ("lease", lease if told.state == State.QUARANTINED.value else lease + then),
        ("owner", f"last seen {ago(told.owner.last_seen_ago)}, {lives}"),
    ]


def _answer(told: Shown) -> list[tuple[str, str]]:
    lines = []
    if told.completed_at is not None:
        lines.append(("completed", f"{told.completed_at}, after {told.duration or 0.0:.3f} s"))
    if told.expires_at is not None:
        lines.append(("kept until", told.expires_at))
    if (answer := told.answer) is not None:
        sealed = f"encrypted under {clean(answer.sealed_under)}" if answer.sealed_under else "not encrypted"
        how = "erased" if answer.erased else sealed
        lines.append(("answer", f"status {answer.status}, {answer.byte_size} bytes, {how}"))
    return lines
