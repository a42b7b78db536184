"""`flask idempotency seal`: encrypt the answers that were stored before encryption was switched on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

import click
from flask.cli import with_appcontext

from flask_idempotency.engine.events import AnswersSealed
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.maintenance.janitor import Drain
from flask_idempotency.maintenance.rotate import PlainSealing, seal_plain
from flask_idempotency.operations import Word
from flask_idempotency.operations.records import Refused
from flask_idempotency.web.cli.audit import word_of, word_options
from flask_idempotency.web.cli.dots import dots
from flask_idempotency.web.cli.group import NOT_IN_ORDER, as_json_option, built, giving_up, say, settings, tell

_OFF: Final = "IDEMPOTENCY_ENCRYPTION is off, so nothing can be sealed. Set it to on first."
_REQUIRED: Final = (
    "IDEMPOTENCY_ENCRYPTION is required, so plain answers are never opened or sealed: anyone who can write to the store may "
    "have planted them. If you stored them before you switched encryption on, set it to on, run this command, and set it to "
    "required again."
)
_WARNING: Final = (
    "Answers in this store that are not encrypted: {plain}. A sealed answer counts as genuine from then on, and retries get "
    "it. Seal them only if your application stored them before you switched encryption on, and no other party could write to "
    "the store since. Else let them expire."
)
_NOTHING: Final = "Every stored answer is encrypted. There is nothing to seal."


@click.command("seal")
@click.option("--yes", is_flag=True, help="Do not ask.")
@word_options(required=True)
@as_json_option
@with_appcontext
def seal_command(yes: bool, actor: str, reason: str, as_json: bool) -> None:
    """Encrypt the answers that were stored before you switched encryption on.

    Runs only while IDEMPOTENCY_ENCRYPTION is on. Anyone who can write to the store may have planted a plain answer, and this
    command makes it genuine: so `rotate` and the janitor never do it, and nothing does it while encryption is required. Asks
    first. Exits with 1 when some answers could not be sealed. Safe to run again, and to break off.
    """
    with giving_up(as_json=as_json):
        chosen, parts = settings(), built()
        if chosen.encryption == "off":
            raise Refused(_OFF)
        if chosen.encryption == "required":
            raise Refused(_REQUIRED)
        if parts.answers is None or chosen.key_ring is None:
            raise Refused("This store cannot list its answers, so they cannot be sealed.")
        plain = parts.answers.count().get("", 0)
        if plain and not yes:
            say(_WARNING.format(plain=plain), err=True)
            click.confirm("Seal them?", abort=True, err=True)
        report = _sealed(word_of(actor, reason)) if plain else PlainSealing()
    if as_json:
        say(json.dumps(asdict(report)))
    else:
        say("\n".join(_sealing_text(report)) if plain else _NOTHING)
    if not report.done:
        raise SystemExit(NOT_IN_ORDER)


def _sealed(word: Word) -> PlainSealing:
    """Seal them, and tell the audit event even if the run breaks off."""
    parts, chosen, sealed, finished = built(), settings(), 0, False
    if parts.answers is None or chosen.key_ring is None:
        raise AssertionError("checked before")

    def count(so_far: int) -> None:
        nonlocal sealed
        sealed = so_far

    owner = owner_mark(chosen.namespace)
    try:
        with dots("answers") as progress:
            drain = Drain(batch=500, budget=float("inf"), told=progress)
            report = seal_plain(parts.answers, parts.codec, chosen.key_ring, drain=drain, owner=owner, told=count)
        finished = True
    finally:
        tell(AnswersSealed("", "", actor=word.actor, reason=word.reason, sealed=sealed, finished=finished))
    return report


def _sealing_text(report: PlainSealing) -> list[str]:
    said = [f"Sealed: {report.sealed}."]
    if report.passed_over:
        said.append(f"Left alone, because they were erased or changed in the meantime: {report.passed_over}.")
    if report.unreadable:
        said.append(f"Damaged, and left as they are: {report.unreadable}. A retry quarantines the key.")
    if report.blocked:
        said.append(f"Left as they are, because their tenants' data keys cannot be used for now: {report.blocked}.")
    return said
