"""Commands about the store itself: its tables (`db`), its key ring (`keys`) and a Redis (`redis`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import click
from flask import current_app
from flask.cli import AppGroup

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import NOT_IN_ORDER, as_json_option, exit_on_error, word_of, word_options
from flask_idempotency.cli.output import Cell, Column, Facts, Part, Style, Styled, Table, clean, say
from flask_idempotency.engine.capabilities import DataLossDetector
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.events import DataLossAcknowledged, StoreInitialised
from flask_idempotency.engine.store import RoleSchema, Schema
from flask_idempotency.operations.admin import (
    DataLossReport,
    KeysReport,
    KeyStatus,
    SchemaReport,
    acknowledge,
    check_acknowledgeable,
    db_check,
    db_upgrade,
    initialise,
    keys_status,
    memory_status,
)
from flask_idempotency.operations.records import Refused
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.web.operator import built, publish, settings, state

# `flask idempotency db`

_NO_SCHEMA: Final = "The store of this application has no schema: there is nothing to do."

db = AppGroup("db", help="Create, upgrade and check the tables of a SQL store.")
cli.add_command(db)


@db.command("upgrade")
@as_json_option
def upgrade(as_json: bool) -> None:
    """Create the tables, or upgrade them to this release.

    Changes the schema of the store's own tables, and no other table. Safe to run again, and in several processes at the
    same time.

    \b
    Example:
      $ flask idempotency db upgrade
    """
    _tell(db_upgrade, "The schema is up to date.", as_json=as_json)


@db.command("check")
@click.option(
    "--role",
    metavar="NAME",
    help="Check instead what this role of PostgreSQL lacks, if your application sets it for a tenant (SET LOCAL ROLE).",
)
@as_json_option
def check(role: str | None, as_json: bool) -> None:
    """Check the tables and their database.

    Read-only. Exits with 0 if they are in order, with 1 and a sentence for each fault if not, and with 2 if the
    database does not answer.

    With --role, exits with 1 if that role lacks a privilege that the transactions of your views need, and prints the
    statements that grant it.

    \b
    Example:
      $ flask idempotency db check
    """
    if role is None:
        _tell(db_check, "The schema is in order.", as_json=as_json)
    else:
        _tell_grants(role, as_json=as_json)


def _tell_grants(role: str, *, as_json: bool) -> None:
    with exit_on_error(as_json=as_json):
        outbox = current_app.extensions.get("idempotency_outbox")
        places = [state().schema, None if outbox is None else outbox.table]
        checked = [place for place in places if isinstance(place, RoleSchema)]
        if not checked:
            raise Refused(
                "The records of this application are not in a database with roles: --role has nothing to check."
            )
        missing = list({each.statement: each for place in checked for each in place.missing_grants(role)}.values())
    if as_json:
        lacking = [{"kind": each.kind, "name": each.name, "privileges": each.privileges} for each in missing]
        grants = [each.statement for each in missing]
        say(json.dumps({"role": role, "in_order": not missing, "missing": lacking, "grants": grants}))
    elif missing:
        lacks = "; ".join(f"{', '.join(each.privileges)} on the {each.kind} {clean(each.name)}" for each in missing)
        say(f"The role {clean(role)} lacks {lacks}. Grant it, as the owner of the tables:")
        say(*(clean(each.statement) for each in missing))
    else:
        say(f"The role {clean(role)} has all privileges that the transactions of views need.")
    if missing:
        raise SystemExit(NOT_IN_ORDER)


def _tell(verb: Callable[[Schema], SchemaReport], fine: str, *, as_json: bool) -> None:
    with exit_on_error(as_json=as_json):
        schema: Schema | None = state().schema
        report = None if schema is None else verb(schema)
        outbox = current_app.extensions.get("idempotency_outbox")
        if outbox is not None:
            # It may be in another database than the records.
            table = verb(outbox.table)
            done, faults = (report.done, report.faults) if report is not None else ((), ())
            advice = () if report is None else report.advice
            report = SchemaReport((*done, *table.done), (*faults, *table.faults), advice)
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


# `flask idempotency keys …`

keys = AppGroup("keys", help="Make and check the keys that responses are sealed with.")
cli.add_command(keys)


@keys.command("generate", with_appcontext=False)
@click.option("--kid", help="The id of the key; today's date unless given. It is no secret.")
def generate(kid: str | None) -> None:
    """Print a new key, as one line of a ring.

    The command stores the key nowhere. It needs no application: you make the first key before there is a
    ring.

    \b
    Example:
      $ flask idempotency keys generate --kid 2026-11
    """
    with exit_on_error(as_json=False):
        try:
            from flask_idempotency.codec.key_sources import generate as made
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "cryptography":
                raise
            raise IdempotencyError(
                "The cryptography package is not installed: pip install 'flask-idempotency[crypto]'."
            ) from error
        line = made(kid)
    say(line)


@keys.command("status")
@as_json_option
def status(as_json: bool) -> None:
    """Show what each ring key protects, and which you may remove.

    Read-only. Exits with 1 if a response is sealed under a key that the ring lacks: it cannot be opened.

    \b
    Example:
      $ flask idempotency keys status
    """
    with exit_on_error(as_json=as_json):
        parts, ring = built(), settings().key_ring
        if ring is None:
            raise Refused("There is no key ring: set IDEMPOTENCY_KEY_RING.")
        if parts.responses is None or parts.data_keys is None:
            raise Refused("The store of this application keeps no data keys, so nothing is sealed in it.")
        report = keys_status(ring, parts.responses, parts.data_keys, parts.journals)
    if as_json:
        say(json.dumps(_key_object(report)))
    else:
        say(_key_table(report), f"Records that are not encrypted: {report.plain_records}.")
    if not report.in_order:
        raise SystemExit(NOT_IN_ORDER)


def _key_object(report: KeysReport) -> dict[str, object]:
    keys = [{**asdict(key), "may_go": key.may_go} for key in report.keys]
    return {"in_order": report.in_order, "plain_records": report.plain_records, "keys": keys}


def _key_table(report: KeysReport) -> Table:
    # A narrow terminal may shorten the id of a key, and never what to do about it.
    head = (Column("key"), Column("records", None), Column("data keys", None), Column("", None))
    return Table(head, tuple((key.kid, str(key.records), str(key.data_keys), _verdict(key)) for key in report.keys))


def _verdict(key: KeyStatus) -> Cell:
    if not key.known:
        return Styled("NOT IN THE RING: put it back, after the newest", Style.BAD)
    if key.newest:
        return Styled("newest", Style.GOOD)
    return "may go: nothing is sealed under it" if key.may_go else "in use"


_ELSEWHERE: Final = (
    "The records of this application are not in a Redis, so nothing is to be made ready or acknowledged here; one that "
    "IDEMPOTENCY_REDIS_URL names is a cache, and may lose everything at any time."
)
_NAME_IT: Final = "Set IDEMPOTENCY_STORE_ID={store_id} wherever this application runs: then any other Redis is refused."
_NOTICES_NOTHING: Final = "not noticed: its scripts are not told INFO. Let the user ask, with ACL SETUSER … +info"

redis = AppGroup("redis", help="Prepare a Redis store, and act on a data loss.")
cli.add_command(redis)


_RISK_OF_INIT: Final = (
    "IDEMPOTENCY_STORE_ID names the store {store_id}, and this Redis is empty. If that store was here before, this Redis was "
    "emptied: all requests whose records were lost run a second time if their clients retry them. Then run `flask "
    'idempotency redis ack --reason "…"`, not `redis init`. In a script, --new confirms that this Redis is new.'
)


@redis.command("init")
@click.option(
    "--new", "is_new", is_flag=True, help="Skip the confirmation: no store with IDEMPOTENCY_STORE_ID was here."
)
@word_options(required=False)
@as_json_option
def init(is_new: bool, actor: str, reason: str, as_json: bool) -> None:
    """Initialise a new Redis, once: until then no new key runs.

    Changes the Redis: it writes the id of the store. Harmless if the Redis is ready. A Redis that held keys before was
    emptied, and its keys would run again. An operator has to acknowledge that (`redis ack`), so do not run this in every
    deployment. Refused if a running process noticed that this Redis was emptied. If IDEMPOTENCY_STORE_ID is set and the
    Redis is empty, you confirm first, or give --new.

    \b
    Example:
      $ flask idempotency redis init --reason "new store"
    """
    with exit_on_error(as_json=as_json):
        memory = _memory()

        def confirm() -> None:
            if not is_new:
                say(_RISK_OF_INIT.format(store_id=clean(memory.rules.store_id)), err=True)
                click.confirm("Is this Redis new?", abort=True, err=True)

        done = initialise(memory, built().recovery, confirm=confirm)
        named = memory.rules.store_id is not None
    if done.created:
        word = word_of(actor, reason)
        publish(StoreInitialised("", "", actor=word.actor, reason=word.reason, store_id=done.store_id))
    if as_json:
        say(json.dumps({"store_id": done.store_id, "new": done.created, "named": named}))
        return
    say(f"{'Made ready' if done.created else 'It was ready before'}: this Redis is {clean(done.store_id)}.")
    if not named:
        say(_NAME_IT.format(store_id=clean(done.store_id)))


@redis.command("status")
@as_json_option
def status_(as_json: bool) -> None:
    """Show what data this Redis may have lost, and what to do.

    Read-only, except that it notes a loss that no request has detected yet. Exits with 1 while new keys are refused.

    \b
    Example:
      $ flask idempotency redis status
    """
    with exit_on_error(as_json=as_json):
        memory = _memory()
        status = memory_status(memory)
        expected = memory.rules.store_id
    say(*[json.dumps(_redis_object(status))] if as_json else _redis_text(status, expected))
    if not status.new_keys_run:
        raise SystemExit(NOT_IN_ORDER)


@redis.command("ack")
@click.option("--force", is_flag=True, help="Even if surviving workers have time left to restore their claims.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@word_options(required=True)
@as_json_option
def ack(force: bool, yes: bool, actor: str, reason: str, as_json: bool) -> None:
    """Let new keys run after a data loss.

    Changes the Redis: it accepts keys that it does not know. Lost keys that were completed, and are still retried, run
    again. Refused until IDEMPOTENCY_DATA_LOSS_GRACE has passed since the loss was detected, unless you give --force. You
    confirm first.

    \b
    Example:
      $ flask idempotency redis ack --reason "restored from the 03:00 snapshot"
    """
    with exit_on_error(as_json=as_json):
        memory = _memory()
        before = memory_status(memory)
        check_acknowledgeable(before, forced=force)
        lost = bool(before.standing.losses)
        if lost:
            if not yes:
                say(*_redis_text(before, memory.rules.store_id), err=True)
                click.confirm("Let keys run that it may have forgotten?", abort=True, err=True)
            _acknowledge(memory, before, actor=actor, reason=reason)
        store_id = before.standing.store_id or memory_status(memory).standing.store_id
        named = memory.rules.store_id is not None
    if as_json:
        say(json.dumps({"acknowledged": dict(before.standing.losses), "store_id": store_id, "named": named}))
        return
    say("Acknowledged: new keys run." if lost else "There is nothing to acknowledge: new keys run.")
    if not named and store_id is not None:
        say(_NAME_IT.format(store_id=clean(store_id)))


def _memory() -> DataLossDetector:
    memory = built().data_loss
    if memory is None:
        raise Refused(_ELSEWHERE)
    return memory


def _acknowledge(memory: DataLossDetector, before: DataLossReport, *, actor: str, reason: str) -> None:
    word, forced, finished = word_of(actor, reason), bool(before.wait), False
    try:
        acknowledge(memory, seen=before.standing, forced=forced)
        finished = True
    finally:  # Ctrl-C too: some parts may have been
        parts = dict(before.parts)
        publish(
            DataLossAcknowledged(
                "", "", actor=word.actor, reason=word.reason, forced=forced, parts=parts, finished=finished
            )
        )


def _redis_object(status: DataLossReport) -> dict[str, object]:
    standing = status.standing
    return {
        "store_id": standing.store_id,
        "parts": dict(standing.parts),
        "losses": dict(standing.losses),
        "since": None if standing.since is None else moment(standing.since),
        "seconds_until_ack": None if status.wait is None else round(status.wait, 3),
        "new_keys_run": status.new_keys_run,
        "notices_restarts": standing.notices_restarts,
        "text": status.text,
        "remedy": status.remedy,
    }


def _redis_text(status: DataLossReport, expected: str | None) -> list[Part]:
    standing = status.standing
    new_keys = Styled("run", Style.GOOD) if status.new_keys_run else Styled("get 503 `memory-lost`", Style.BAD)
    facts: list[tuple[str, Cell]] = [
        ("store id", clean(standing.store_id) + ("" if expected else ", and IDEMPOTENCY_STORE_ID is not set")),
        ("parts", ", ".join(f"{count} {name}" for name, count in sorted(standing.parts.items()))),
        ("new keys", new_keys),
    ]
    if standing.since is not None:
        facts.append(("last loss", f"{moment(standing.since)}, {format_duration(standing.now - standing.since)} ago"))
    if status.wait is not None:
        facts.append(("ack", f"in {format_duration(status.wait)}" if status.wait else "now"))
    restarts = "noticed" if standing.notices_restarts else Styled(_NOTICES_NOTHING, Style.WARNING)
    facts.append(("restarts", restarts))
    return [Facts(tuple(facts), width=10), "", status.text, *([status.remedy] if status.remedy else [])]
