"""`flask idempotency rotate` and `reconcile`: chores by hand, or by cron where there is no janitor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from flask.cli import with_appcontext

from flask_idempotency.engine.upkeep import Answers, DataKeys
from flask_idempotency.maintenance.drain import Drain
from flask_idempotency.maintenance.reconcile import Reconciliation, reconcile
from flask_idempotency.maintenance.rotate import GRACE_SECONDS, Rotation, Sealed, rotate
from flask_idempotency.web.cli.group import NOT_IN_ORDER, Refused, as_json_option, built, giving_up, settings


@click.command("rotate")
@as_json_option
@with_appcontext
def rotate_command(as_json: bool) -> None:
    """Seal every answer anew under the newest key of the ring.

    Requests go on meanwhile. Run it once more five minutes later, and the old data keys go as well; `keys status` then says
    which key of the ring may go. Exits with 1 when there are answers that cannot be opened. Safe to run again, and twice
    at once.
    """
    with giving_up(as_json=as_json):
        answers, data_keys = _sealed()
        with _dots("answers") as told:
            drain = Drain(batch=500, budget=float("inf"), told=told)
            report = rotate(answers, data_keys, built().codec, _ring(), drain=drain)
    click.echo(json.dumps({**asdict(report), "done": report.done}) if as_json else _rotated(report))
    if report.unreadable or report.blocked:
        raise SystemExit(NOT_IN_ORDER)


@click.command("reconcile")
@as_json_option
@with_appcontext
def reconcile_command(as_json: bool) -> None:
    """Count the records of every tenant again, and put their ledgers right.

    Exits with 1 when one was wrong: that only happens when somebody has deleted records by hand. Safe to run again, and
    twice at once.
    """
    with giving_up(as_json=as_json):
        ledger = built().ledger
        if ledger is None:
            raise Refused("The store of this application does not count, so there is nothing to reconcile.")
        with _dots("tenants") as told:
            report = reconcile(ledger, drain=Drain(budget=float("inf"), told=told))
    click.echo(json.dumps(asdict(report)) if as_json else _reconciled(report))
    if report.drifted:
        raise SystemExit(NOT_IN_ORDER)


def _sealed() -> tuple[Answers, DataKeys]:
    parts = built()
    if settings().encryption == "off":
        raise Refused("Encryption is off, so nothing is sealed anew: set IDEMPOTENCY_ENCRYPTION to on.")
    if parts.answers is None or parts.data_keys is None:
        raise Refused("The answers of this store cannot be walked through, so they cannot be sealed anew.")
    return parts.answers, parts.data_keys


def _ring() -> Sealed:
    ring = settings().key_ring
    if ring is None:
        raise Refused("There is no key ring: set IDEMPOTENCY_KEY_RING.")
    return ring


@contextmanager
def _dots(what: str) -> Iterator[Callable[[int], object]]:
    """A dot on a terminal for every page, so that a person sees it going on."""
    if not sys.stderr.isatty():
        yield lambda touched: None
        return
    click.echo(f"Looking at {what} ", nl=False, err=True)
    yield lambda touched: click.echo(".", nl=False, err=True)
    click.echo(err=True)


def _rotated(report: Rotation) -> str:
    said = [
        f"Sealed anew: {report.resealed}. Wiped, because they were erased: {report.wiped}.",
        f"Data keys that seal no more: {report.closed}. Data keys that are gone: {report.retired}.",
    ]
    if report.unreadable:
        said.append(
            f"Cannot be opened: {report.unreadable}. `flask idempotency keys status` says whether a key is missing in the ring."
        )
    if report.blocked:
        said.append(f"Left alone, because their tenants' data keys cannot be used for now: {report.blocked}.")
    if not report.done:
        said.append(f"Run it once more after {GRACE_SECONDS / 60:g} minutes: then the old data keys go as well.")
    return "\n".join(said)


def _reconciled(report: Reconciliation) -> str:
    said = [f"Tenants: {report.tenants}. Ledgers that were wrong, and are right now: {report.drifted}."]
    if report.drifted:
        said.append(f"Wrong by {report.records} records, {report.bytes} bytes and {report.unsettled} unsettled claims.")
    if report.busy:
        said.append(f"Changed while they were counted, and left for the next time: {report.busy}.")
    return "\n".join(said)
