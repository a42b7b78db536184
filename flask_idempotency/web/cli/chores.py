"""`flask idempotency reap`, `expire`, `rotate` and `reconcile`: chores by hand, or by cron where there is no janitor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from flask import current_app
from flask.cli import with_appcontext

from flask_idempotency.assembly import Built
from flask_idempotency.maintenance.janitor import Chore, Expiration, Reconciliation, Report
from flask_idempotency.maintenance.reap import Reaping
from flask_idempotency.maintenance.rotate import GRACE_SECONDS, Rotation
from flask_idempotency.operations.records import Refused
from flask_idempotency.settings import Settings
from flask_idempotency.web.chores import drain_of, hurried, janitor_of
from flask_idempotency.web.cli.dots import dots
from flask_idempotency.web.cli.group import NOT_IN_ORDER, as_json_option, built, giving_up, say, settings

_BUSY: Final = "Somebody else is at it just now, or was, and was killed less than its budget ago. Nothing was done."
_UNFINISHED: Final = "Its budget ended before it was finished: run it again."

_LONGEST_BUDGET_SECONDS: Final = 7000
"""With the minute for which its lock outlives it, less than `LONGEST_LOCK_SECONDS`: a longer lock keeps nobody out."""


@dataclass(frozen=True, slots=True)
class _Told:
    """How one chore is offered and told of."""

    chore: Chore
    what: str
    """What it looks at."""
    budget: float
    said: Callable[[Any], list[str]]
    in_order: Callable[[Any], bool]
    refusal: Callable[[Built, Settings], str]
    """Why there is no such work here."""


def _run(told: _Told, budget: float, *, as_json: bool) -> None:
    with giving_up(as_json=as_json):
        parts, chosen = built(), settings()
        janitor = janitor_of(current_app._get_current_object())  # type: ignore[attr-defined]
        if told.chore not in janitor.chores:
            raise Refused(told.refusal(parts, chosen))
        with dots(told.what) as progress:
            drain = hurried(drain_of(told.chore, chosen), budget=budget, told=progress)
            report = janitor.run(told.chore, drain)
    say(json.dumps(_task_object(report)) if as_json else _task_text(told, report))
    if report is not None and not told.in_order(report):
        raise SystemExit(NOT_IN_ORDER)


def _task_object(report: Report | None) -> dict[str, object]:
    if report is None:
        return {"busy": True}
    done = {"done": report.done} if isinstance(report, Rotation) else {}
    return {"busy": False, **asdict(report), **done}


def _task_text(told: _Told, report: Report | None) -> str:
    if report is None:
        return _BUSY
    return "\n".join([*told.said(report), *([] if report.finished else [_UNFINISHED])])


def _reaped(report: Reaping) -> list[str]:
    said = [f"Quarantined, because their owners have vanished: {report.quarantined}."]
    if report.waiting:
        said.append(f"To be taken over by their next retries: {report.waiting}.")
    if report.asked:
        said.append(
            f"Resolvers were asked about {report.asked}: {report.completed} completed, {report.released} released, "
            f"{report.unknown} unknown still, {report.failed} failed."
        )
    if report.failed:
        said.append("The log says which resolver failed, and how.")
    return said


def _expired(report: Expiration) -> list[str]:
    return [f"Removed, because their time was over: {report.removed}."]


def _rotated(report: Rotation) -> list[str]:
    said = [
        f"Sealed anew: {report.resealed}. Wiped, because they were erased: {report.wiped}.",
        f"Data keys that seal no more: {report.closed}. Data keys that are gone: {report.retired}.",
    ]
    if report.plain:
        said.append(
            f"Not encrypted, and left as they are: {report.plain}. `flask idempotency seal` encrypts those that you stored "
            "before you switched encryption on."
        )
    if report.unreadable:
        said.append(
            f"Cannot be opened: {report.unreadable}. `flask idempotency keys status` says whether a key is missing in the ring."
        )
    if report.blocked:
        said.append(f"Left alone, because their tenants' data keys cannot be used for now: {report.blocked}.")
    if not report.done:
        said.append(f"Run it once more after {GRACE_SECONDS / 60:g} minutes: then the old data keys go as well.")
    return said


def _reconciled(report: Reconciliation) -> list[str]:
    said = [f"Tenants: {report.tenants}. Ledgers that were wrong, and are right now: {report.drifted}."]
    if report.drifted:
        said.append(f"Wrong by {report.records} records, {report.bytes} bytes and {report.unsettled} unsettled claims.")
    if report.busy:
        said.append(f"Changed while they were counted, and left for the next time: {report.busy}.")
    return said


def _no_rotation(parts: Built, chosen: Settings) -> str:
    if chosen.encryption == "off":
        return "Encryption is off, so nothing is sealed anew: set IDEMPOTENCY_ENCRYPTION to on."
    if parts.answers is None or parts.data_keys is None:
        return "The answers of this store cannot be walked through, so they cannot be sealed anew."
    return "There is no key ring: set IDEMPOTENCY_KEY_RING."


def _no_reconciling(parts: Built, chosen: Settings) -> str:
    if parts.ledger is None:
        return "The store of this application does not count, so there is nothing to reconcile."
    return "Quotas are off in this application, so nothing is counted, and there is nothing to reconcile."


_TOLD: Final = {
    "reap": _Told(
        "reap",
        "claims",
        300.0,
        _reaped,
        lambda report: not report.failed,
        lambda parts, chosen: "The store of this application cannot be searched for claims: it has no `unsettled`.",
    ),
    "expire": _Told(
        "expire",
        "what is over",
        300.0,
        _expired,
        lambda report: True,
        lambda parts, chosen: "The store of this application ends things by itself: it has no `expiry`.",
    ),
    "rotate": _Told(
        "rotate",
        "answers",
        3600.0,
        _rotated,
        lambda report: not report.unreadable and not report.blocked,
        _no_rotation,
    ),
    "reconcile": _Told("reconcile", "tenants", 3600.0, _reconciled, lambda report: not report.drifted, _no_reconciling),
}


def _budget_option(chore: Chore) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--budget",
        type=click.FloatRange(1, _LONGEST_BUDGET_SECONDS),
        metavar="SECONDS",
        default=_TOLD[chore].budget,
        show_default=True,
        help=f"End after this, finished or not: {_LONGEST_BUDGET_SECONDS:,} at most, for no lock lasts longer than two hours.",
    )


@click.command("reap")
@_budget_option("reap")
@as_json_option
@with_appcontext
def reap_command(budget: float, as_json: bool) -> None:
    """Quarantine the claims of owners that have vanished, and ask resolvers what became of their work.

    Exits with 1 when a resolver has failed. Safe to run again; when somebody else is at it, it says so and exits with 0.
    """
    _run(_TOLD["reap"], budget, as_json=as_json)


@click.command("expire")
@_budget_option("expire")
@as_json_option
@with_appcontext
def expire_command(budget: float, as_json: bool) -> None:
    """Remove what nobody can see any more: answers whose time is over, and what belongs to them.

    Safe to run again; when somebody else is at it, it says so and exits with 0.
    """
    _run(_TOLD["expire"], budget, as_json=as_json)


@click.command("rotate")
@_budget_option("rotate")
@as_json_option
@with_appcontext
def rotate_command(budget: float, as_json: bool) -> None:
    """Seal every answer anew that is sealed under another key of the ring than the newest.

    Plain answers stay plain: see `seal`. Requests go on meanwhile. Run it once more five minutes later, and the old data keys
    go as well; `keys status` then says which key of the ring may go. Exits with 1 when there are answers that cannot be
    opened. Safe to run again; when somebody else is at it, it says so and exits with 0.
    """
    _run(_TOLD["rotate"], budget, as_json=as_json)


@click.command("reconcile")
@_budget_option("reconcile")
@as_json_option
@with_appcontext
def reconcile_command(budget: float, as_json: bool) -> None:
    """Count the records of every tenant again, and put their ledgers right.

    Exits with 1 when one was wrong: that only happens when somebody has deleted records by hand. Safe to run again; when
    somebody else is at it, it says so and exits with 0.
    """
    _run(_TOLD["reconcile"], budget, as_json=as_json)
