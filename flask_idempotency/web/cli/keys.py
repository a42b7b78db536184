"""`flask idempotency keys …`"""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from flask.cli import AppGroup

from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.operations import KeysReport, KeyStatus, keys_status
from flask_idempotency.operations.records import Refused
from flask_idempotency.web.cli.group import NOT_IN_ORDER, as_json_option, built, giving_up, say, settings, table

keys = AppGroup("keys", help="The keys that answers are encrypted with.")


@keys.command("generate", with_appcontext=False)
@click.option("--kid", help="The id of the key; today's date unless given. It is no secret.")
def generate(kid: str | None) -> None:
    """Print a new key, as one line of a ring.

    It is written nowhere else. Needs no application: the first key is made before there is a ring.
    """
    with giving_up(as_json=False):
        try:
            from flask_idempotency.codec.keyring import generate as made
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
    """Say what is sealed under which key of the ring, and which old key may go.

    Exits with 1 when something is sealed under a key that the ring has not: nobody can open that. Changes nothing.
    """
    with giving_up(as_json=as_json):
        parts, ring = built(), settings().key_ring
        if ring is None:
            raise Refused("There is no key ring: set IDEMPOTENCY_KEY_RING.")
        if parts.answers is None or parts.data_keys is None:
            raise Refused("The store of this application keeps no data keys, so nothing is sealed in it.")
        report = keys_status(ring, parts.answers, parts.data_keys)
    say(json.dumps(_key_object(report)) if as_json else _key_text(report))
    if not report.in_order:
        raise SystemExit(NOT_IN_ORDER)


def _key_object(report: KeysReport) -> dict[str, object]:
    keys = [{**asdict(key), "may_go": key.may_go} for key in report.keys]
    return {"in_order": report.in_order, "plain_records": report.plain_records, "keys": keys}


def _key_text(report: KeysReport) -> str:
    rows = [(key.kid, str(key.records), str(key.data_keys), _verdict(key)) for key in report.keys]
    return "\n".join(
        (
            table(("key", "records", "data keys", ""), rows),
            f"Records that are not encrypted: {report.plain_records}.",
        )
    )


def _verdict(key: KeyStatus) -> str:
    if not key.known:
        return "NOT IN THE RING: put it back, after the newest"
    if key.newest:
        return "newest"
    return "may go: nothing is sealed under it" if key.may_go else "in use"
