"""`flask idempotency …`: parse, call a verb, print. What a verb does is in `operations.py`.

Exit codes: 0 when all is in order, 1 when it is not, 2 when nobody can tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, NoReturn

import click
from flask import current_app
from flask.cli import AppGroup

from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.ports import Schema
from flask_idempotency.operations import SchemaReport, db_check, db_upgrade

_NOT_IN_ORDER: Final = 1
_UNKNOWN: Final = 2
_NO_SCHEMA: Final = "The store of this application has no schema: there is nothing to do."

cli = AppGroup("idempotency", help="Look after the records of idempotency keys.")
"""Stateless, so that one object serves every application."""


@cli.group("db")
def db() -> None:
    """The tables of a SQL store."""


_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")


@db.command("upgrade")
@_as_json
def upgrade(as_json: bool) -> None:
    """Make the tables, or bring them to this release.

    Safe to run again, and in several processes at once.
    """
    _tell(db_upgrade, "The schema is up to date.", as_json=as_json)


@db.command("check")
@_as_json
def check(as_json: bool) -> None:
    """Say whether the tables and their database are in order.

    Exits with 0 when they are, with 1 and a sentence for each fault when not, and with 2 when the database cannot be
    asked. Changes nothing.
    """
    _tell(db_check, "The schema is in order.", as_json=as_json)


def _tell(verb: Callable[[Schema], SchemaReport], fine: str, *, as_json: bool) -> None:
    try:
        schema = _schema()
        report = None if schema is None else verb(schema)
    except IdempotencyError as error:
        _give_up(str(error), as_json=as_json)
    click.echo(_as_object(report) if as_json else _as_text(report, fine))
    if report is not None and not report.in_order:
        raise SystemExit(_NOT_IN_ORDER)


def _schema() -> Schema | None:
    """The schema of this application's store; None for one that keeps no tables."""
    state: Any = current_app.extensions.get("idempotency")
    if state is None:
        raise IdempotencyError("Idempotency is not set up on this application: call init_app first.")
    schema: Schema | None = state.schema
    return schema


def _as_object(report: SchemaReport | None) -> str:
    shown = report or SchemaReport(done=(), faults=(), advice=())
    return json.dumps({"schema": report is not None, "in_order": shown.in_order, **asdict(shown)})


def _as_text(report: SchemaReport | None, fine: str) -> str:
    if report is None:
        return _NO_SCHEMA
    verdict = () if report.done or report.faults else (fine,)
    return "\n".join([*report.done, *report.faults, *verdict, *(f"Advice: {each}" for each in report.advice)])


def _give_up(why: str, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"error": why}))
    else:
        click.echo(f"Error: {why}", err=True)
    raise SystemExit(_UNKNOWN)
