"""`flask idempotency stats`"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from flask import current_app
from flask.cli import with_appcontext

from flask_idempotency.assembly import Built
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.operations import Stats, stats
from flask_idempotency.operations.identity import Change, look
from flask_idempotency.operations.records import span
from flask_idempotency.web.cli.group import (
    as_json_option,
    built,
    giving_up,
    policies,
    say,
    settings,
    state,
    unsettled,
)
from flask_idempotency.web.cli.telling import clean
from flask_idempotency.web.watch import shape_in


@click.command("stats")
@click.option("--quick", is_flag=True, help="Leave out the completed records: counting those may take long.")
@as_json_option
@with_appcontext
def stats_command(quick: bool, as_json: bool) -> None:
    """How many records there are, in which state, and when each chore was last done. Changes nothing."""
    with giving_up(as_json=as_json):
        found, parts = unsettled(), built()
        if not quick and sys.stderr.isatty():
            say("Counting the completed records; --quick leaves them out.", err=True)
        told = stats(
            found,
            answers=None if quick else parts.answers,
            data_keys=parts.data_keys,
            ledger=parts.ledger,
            chores=parts.chores,
            identity=_identity(parts),
        )
    say(json.dumps(asdict(told)) if as_json else "\n".join(_stats_text(told, quick=quick)))


def _stats_text(told: Stats, *, quick: bool) -> list[str]:
    lines = [*_standing(told.standing), _count("completed", told.completed, "not counted" if quick else "not known")]
    lines += [_count("data keys", told.data_keys), _count("tenants with a ledger", told.tenants)]
    lines += [clean(f"identity: {each.text} {each.remedy}") for each in told.identity or ()]
    if told.chores is None:
        return [*lines, "This store remembers no chores, so nobody can tell whether a janitor comes."]
    if not told.chores:
        return [*lines, "No chore was ever reported: is there a janitor, or a cron job?"]
    return [
        *lines,
        *(f"{clean(chore)}: {span(run.ago)} ago{_did(run.did)}" for chore, run in sorted(told.chores.items())),
    ]


def _identity(parts: Built) -> tuple[Change, ...] | None:
    if parts.book is None:
        return None
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    return look(parts.book, shape_in(app, settings(), state().loaders, policies()), note=False).changes


def _standing(standing: UnfinishedCounts) -> list[str]:
    return [
        _count("in flight", standing.in_flight),
        _count("lapsed", standing.lapsed) + _since(standing.lapsed_for),
        _count("quarantined", standing.quarantined) + _since(standing.quarantined_for),
    ]


def _count(name: str, count: int | None, otherwise: str = "not known") -> str:
    return f"{name}: {otherwise if count is None else count}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {span(seconds)}"


def _did(did: Mapping[str, Any]) -> str:
    """What a report says besides nothing. It comes from a store, so it is distrusted."""
    counts = [
        f"{clean(str(name)).replace('_', ' ')} {clean(str(count))}"
        for name, count in did.items()
        if count and name not in ("finished", "seconds")
    ]
    unfinished = ["not finished"] if did.get("finished") is False else []
    said = ", ".join([*counts, *unfinished])
    return f": {said}" if said else ""
