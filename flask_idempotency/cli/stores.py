"""Commands about the store itself: its tables (`db`), its key ring (`keys`) and a Redis (`redis`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click
from flask import current_app
from flask.cli import AppGroup

from flask_idempotency.cli import Commands, cli
from flask_idempotency.cli.context import NOT_IN_ORDER, Output, confirm, exit_on_error, word_options
from flask_idempotency.cli.output import Cell, Line, Style, Styled, clean, facts, say, table
from flask_idempotency.engine.capabilities import DataLossDetector
from flask_idempotency.engine.errors import importing
from flask_idempotency.engine.events import DataLossAcknowledged, StoreInitialised
from flask_idempotency.engine.store import RoleSchema, Schema
from flask_idempotency.operations import admin
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.web.operator import built, needed, publish, settings, state

# `flask idempotency db`

_NO_SCHEMA: Final = "The store of this application has no schema: there is nothing to do."

db: Final = Commands("db", help="Create, upgrade and check the tables of a SQL store.")
cli.add_command(db)


@db.command("upgrade")
def upgrade() -> Output:
    """Create the tables, or upgrade them to this release.

    Changes the schema of the store's own tables, and no other table. Safe to run again, and in several processes at the
    same time.

    \b
    Example:
      $ flask idempotency db upgrade
    """
    return _of_schema("The schema is up to date.", upgrade=True)


@db.command("check")
@click.option(
    "--role",
    metavar="NAME",
    help="Check instead what this role of PostgreSQL lacks, if your application sets it for a tenant (SET LOCAL ROLE).",
)
def check(role: str | None) -> Output:
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
        return _of_schema("The schema is in order.", upgrade=False)
    checked = [place for place in _schemas() if isinstance(place, RoleSchema)]
    if not checked:
        raise Refused("The records of this application are not in a database with roles: --role has nothing to check.")
    missing = list({each.statement: each for place in checked for each in place.missing_grants(role)}.values())
    lacking = [{"kind": each.kind, "name": each.name, "privileges": each.privileges} for each in missing]
    grants = [each.statement for each in missing]
    found = {"role": role, "in_order": not missing, "missing": lacking, "grants": grants}
    if not missing:
        return Output(found, [f"The role {clean(role)} has all privileges that the transactions of views need."])
    lacks = "; ".join(f"{', '.join(each.privileges)} on the {each.kind} {clean(each.name)}" for each in missing)
    head = f"The role {clean(role)} lacks {lacks}. Grant it, as the owner of the tables:"
    return Output(found, [head, *map(clean, grants)], NOT_IN_ORDER)


def _schemas() -> list[Schema]:
    """Return the schema of the records, and of the outbox: that may be in another database."""
    outbox = current_app.extensions.get("idempotency_outbox")
    return [each for each in (state().schema, None if outbox is None else outbox.table) if each is not None]


def _of_schema(fine: str, *, upgrade: bool) -> Output:
    schemas = _schemas()
    # What an upgrade cannot repair stays a fault.
    done = [each for schema in schemas if upgrade for each in schema.upgrade()]
    faults, advice = ([each for schema in schemas for each in getattr(schema, of)()] for of in ("faults", "advice"))
    found = {"schema": bool(schemas), "in_order": not faults, "done": done, "faults": faults, "advice": advice}
    verdict = [] if done or faults else [fine if schemas else _NO_SCHEMA]
    lines = [*done, *faults, *verdict, *(f"Advice: {each}" for each in advice)]
    return Output(found, lines, NOT_IN_ORDER if faults else 0)


# `flask idempotency keys …`

keys: Final = Commands("keys", help="Make and check the keys that responses are sealed with.")
cli.add_command(keys)


# It prints a line for a file, and has no other form of it.
@AppGroup.command(keys, "generate", with_appcontext=False)
@click.option("--kid", help="The id of the key; today's date and a random suffix unless given. It is no secret.")
def generate(kid: str | None) -> None:
    """Print a new key, as one line of a ring.

    The command stores the key nowhere. It needs no application: you make the first key before there is a
    ring.

    \b
    Example:
      $ flask idempotency keys generate --kid 2026-11
    """
    with exit_on_error():
        missing = "The cryptography package is not installed: pip install 'flask-idempotency[crypto]'."
        with importing("cryptography", otherwise=missing):
            from flask_idempotency.codec.key_sources import generate as made
        line = made(kid)
    say(line)


@keys.command("status")
def status() -> Output:
    """Show what each ring key protects, and which you may remove.

    Read-only. Exits with 1 if a response is sealed under a key that the ring lacks, or if a key does not
    open the data keys that name it: such responses cannot be opened.

    \b
    Example:
      $ flask idempotency keys status
    """
    parts, ring = built(), needed(settings().key_ring, "There is no key ring: set IDEMPOTENCY_KEY_RING.")
    if parts.responses is None or parts.data_keys is None:
        raise Refused("The store of this application keeps no data keys, so nothing is sealed in it.")
    report = admin.keys_status(ring, parts.responses, parts.data_keys, parts.journals)
    shown = [{**asdict(key), "may_go": key.may_go} for key in report.keys]
    rows = (
        {"key": key.kid, "records": str(key.records), "data keys": str(key.data_keys), "": _verdict(key)}
        for key in report.keys
    )
    return Output(
        {"in_order": report.in_order, "plain_records": report.plain_records, "keys": shown},
        [*table(rows), f"Records that are not encrypted: {report.plain_records}."],
        0 if report.in_order else NOT_IN_ORDER,
    )


def _verdict(key: admin.KeyStatus) -> Cell:
    if not key.known:
        return Styled("NOT IN THE RING: put it back, after the newest", Style.BAD)
    if key.unopened:
        return Styled("DOES NOT OPEN its data keys: the store's were wrapped by another key of this id", Style.BAD)
    if key.newest:
        return Styled("newest", Style.GOOD)
    return "may go: nothing is sealed under it" if key.may_go else "in use"


_ELSEWHERE: Final = (
    "The records of this application are not in a Redis, so nothing is to be made ready or acknowledged here; one that "
    "IDEMPOTENCY_REDIS_URL names is a cache, and may lose everything at any time."
)
_NAME_IT: Final = "Set IDEMPOTENCY_STORE_ID={store_id} wherever this application runs: then any other Redis is refused."
_NOTICES_NOTHING: Final = "not noticed: its scripts are not told INFO. Let the user ask, with ACL SETUSER … +info"

redis: Final = Commands("redis", help="Prepare a Redis store, and act on a data loss.")
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
def init(is_new: bool, word: AuditNote) -> Output:
    """Initialise a new Redis, once: until then no new key runs.

    Changes the Redis: it writes the id of the store. Harmless if the Redis is ready. A Redis that held keys before was
    emptied, and its keys would run again. An operator has to acknowledge that (`redis ack`), so do not run this in every
    deployment. Refused if a running process noticed that this Redis was emptied. If IDEMPOTENCY_STORE_ID is set and the
    Redis is empty, you confirm first, or give --new.

    \b
    Example:
      $ flask idempotency redis init --reason "new store"
    """
    memory = needed(built().data_loss, _ELSEWHERE)
    risk = _RISK_OF_INIT.format(store_id=clean(memory.rules.store_id))
    store_id, created = admin.initialise(
        memory, built().recovery, confirm=lambda: confirm("Is this Redis new?", risk, yes=is_new)
    )
    if created:
        publish(StoreInitialised("", "", **asdict(word), store_id=store_id))
    head = f"{'Made ready' if created else 'It was ready before'}: this Redis is {clean(store_id)}."
    found = {"store_id": store_id, "new": created, "named": memory.rules.store_id is not None}
    return Output(found, [head, *_name_it(memory, store_id)])


def _name_it(memory: DataLossDetector, store_id: str | None) -> list[str]:
    advised = store_id is not None and memory.rules.store_id is None
    return [_NAME_IT.format(store_id=clean(store_id))] if advised else []


@redis.command("status")
def status_() -> Output:
    """Show what data this Redis may have lost, and what to do.

    Read-only, except that it notes a loss that no request has detected yet. Exits with 1 while new keys are refused.

    \b
    Example:
      $ flask idempotency redis status
    """
    memory = needed(built().data_loss, _ELSEWHERE)
    status = admin.memory_status(memory)
    standing = status.standing
    found = {
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
    return Output(found, _redis_lines(status, memory), 0 if status.new_keys_run else NOT_IN_ORDER)


@redis.command("ack")
@click.option("--force", is_flag=True, help="Even if surviving workers have time left to restore their claims.")
@word_options(required=True)
def ack(force: bool, yes: bool, word: AuditNote) -> Output:
    """Let new keys run after a data loss.

    Changes the Redis: it accepts keys that it does not know. Lost keys that were completed, and are still retried, run
    again. Refused until IDEMPOTENCY_DATA_LOSS_GRACE has passed since the loss was detected, unless you give --force. You
    confirm first.

    \b
    Example:
      $ flask idempotency redis ack --reason "restored from the 03:00 snapshot"
    """
    memory = needed(built().data_loss, _ELSEWHERE)
    before = admin.memory_status(memory)
    admin.check_acknowledgeable(before, forced=force)
    lost, finished = before.standing.losses, False
    if lost:
        confirm("Let keys run that it may have forgotten?", *_redis_lines(before, memory), yes=yes)
        try:
            admin.acknowledge(memory, seen=before.standing, forced=bool(before.wait))
            finished = True
        finally:  # Ctrl-C too: some parts may have been
            parts, forced = dict(before.standing.parts), bool(before.wait)
            publish(DataLossAcknowledged("", "", **asdict(word), forced=forced, parts=parts, finished=finished))
    store_id = before.standing.store_id or admin.memory_status(memory).standing.store_id
    head = "Acknowledged: new keys run." if lost else "There is nothing to acknowledge: new keys run."
    found = {"acknowledged": dict(lost), "store_id": store_id, "named": memory.rules.store_id is not None}
    return Output(found, [head, *_name_it(memory, store_id)])


def _redis_lines(status: admin.DataLossReport, memory: DataLossDetector) -> list[Line]:
    standing, unnamed = status.standing, "" if memory.rules.store_id else ", and IDEMPOTENCY_STORE_ID is not set"
    rows: list[tuple[str, Cell]] = [
        ("store id", clean(standing.store_id) + unnamed),
        ("parts", ", ".join(f"{count} {name}" for name, count in sorted(standing.parts.items()))),
        (
            "new keys",
            Styled("run", Style.GOOD) if status.new_keys_run else Styled("get 503 `memory-lost`", Style.BAD),
        ),
    ]
    if standing.since is not None:
        rows.append(("last loss", f"{moment(standing.since)}, {format_duration(standing.now - standing.since)} ago"))
    if status.wait is not None:
        rows.append(("ack", f"in {format_duration(status.wait)}" if status.wait else "now"))
    rows.append(("restarts", "noticed" if standing.notices_restarts else Styled(_NOTICES_NOTHING, Style.WARNING)))
    return [*facts(rows, width=11), "", status.text, *([status.remedy] if status.remedy else [])]
