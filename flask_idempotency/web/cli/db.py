"""`flask idempotency db …`"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from flask.cli import AppGroup

from flask_idempotency.engine.store import Schema
from flask_idempotency.operations import SchemaReport, db_check, db_upgrade
from flask_idempotency.web.cli.group import NOT_IN_ORDER, as_json_option, giving_up, say, state

_NO_SCHEMA: Final = "The store of this application has no schema: there is nothing to do."

db = AppGroup("db", help="The tables of a SQL store.")


@db.command("upgrade")
@as_json_option
def upgrade(as_json: bool) -> None:
    """Make the tables, or bring them to this release.

    Safe to run again, and in several processes at once.
    """
    _tell(db_upgrade, "The schema is up to date.", as_json=as_json)


@db.command("check")
@as_json_option
def check(as_json: bool) -> None:
    """Say whether the tables and their database are in order.

    Exits with 0 when they are, with 1 and a sentence for each fault when not, and with 2 when the database cannot be
    asked. Changes nothing.
    """
    _tell(db_check, "The schema is in order.", as_json=as_json)


def _tell(verb: Callable[[Schema], SchemaReport], fine: str, *, as_json: bool) -> None:
    with giving_up(as_json=as_json):
        schema: Schema | None = state().schema
        report = None if schema is None else verb(schema)
    say(_schema_object(report) if as_json else _schema_text(report, fine))
    if report is not None and not report.in_order:
        raise SystemExit(NOT_IN_ORDER)


def _schema_object(report: SchemaReport | None) -> str:
    shown = report or SchemaReport(done=(), faults=(), advice=())
    return json.dumps({"schema": report is not None, "in_order": shown.in_order, **asdict(shown)})


def _schema_text(report: SchemaReport | None, fine: str) -> str:
    if report is None:
        return _NO_SCHEMA
    verdict = () if report.done or report.faults else (fine,)
    return "\n".join([*report.done, *report.faults, *verdict, *(f"Advice: {each}" for each in report.advice)])
