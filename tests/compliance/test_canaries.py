"""Everything that is emitted and everything that is stored is searched for what must be in neither."""

from __future__ import annotations

import logging
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from werkzeug.test import TestResponse

from flask_idempotency import current_claim, idempotent
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, OnExpiry, Record
from flask_idempotency.engine.offered import capabilities_of
from flask_idempotency.outbox.outbox import Outbox
from tests.compliance.conftest import Bank, new_bank
from tests.compliance.vaults import FILES, Vault
from tests.outbox.conftest import Sent

KEY, PRINCIPAL, TENANT = "canary-of-the-key", "canary-of-the-principal", "canary-of-the-tenant"
ASKED, PLACE = "canary-of-the-body", "/canary-of-a-header"
CANARIES = (KEY, PRINCIPAL, TENANT, ASKED, PLACE)
WHO = {"X-User": PRINCIPAL, "X-Tenant": TENANT}


class Ear(logging.Handler):
    """Hears every logger at every level: the message, its arguments, everything attached to it, and its traceback."""

    def __init__(self) -> None:
        super().__init__(level=0)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard += [self.format(record), repr(record.__dict__)]


@contextmanager
def listening() -> Iterator[Ear]:
    ear, root = Ear(), logging.getLogger()
    loggers = [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    levels = [(each, each.level, each.disabled) for each in loggers]
    root.addHandler(ear)
    try:
        for each in loggers:
            each.disabled = False
            each.setLevel(logging.DEBUG)
        yield ear
    finally:
        root.removeHandler(ear)
        for each, level, disabled in levels:
            each.setLevel(level)
            each.disabled = disabled


def pay(bank: Bank, key: str = KEY, **headers: str) -> TestResponse:
    return bank.pay(key, **{"to": ASKED, "X-At": PLACE, **WHO, **headers})


def key_of(bank: Bank, key: str) -> StorageKey:
    return bank.key_of(key, tenant=TENANT, principal=PRINCIPAL)


def go_everywhere(bank: Bank) -> dict[str, TestResponse]:
    """Every way a keyed request can end. What refuses it is ours to write; the rest is the view's."""
    answers = {"first": pay(bank), "replay": pay(bank), "mismatch": pay(bank, to="another")}
    answers["malformed"] = pay(bank, KEY + " " + KEY)
    answers["view failed"] = pay(bank, KEY + "-fails", **{"X-Fails": "1"})
    flying = key_of(bank, KEY + "-flying")
    fingerprint = b"\1" + bytes(16)
    bank.store.claim(ClaimRequest(flying, fingerprint, OnExpiry.QUARANTINE), token=bytes(16), lease=60)
    answers["held by another"] = pay(bank, KEY + "-flying")
    pay(bank, KEY + "-damaged")
    bank.vault.forge(key_of(bank, KEY + "-damaged"), _damaged)
    answers["damaged"] = pay(bank, KEY + "-damaged")
    answers["quarantined"] = pay(bank, KEY + "-damaged")
    data_keys = capabilities_of(bank.store).data_keys
    assert data_keys is not None
    data_keys.shred(flying.tid)
    answers["erased"] = pay(bank)
    answers["over quota"] = pay(bank, KEY + "-one-too-many")
    return answers


def _damaged(record: Record) -> Record:
    assert record.payload is not None
    return replace(record, payload=replace(record.payload, data=record.payload.data[::-1]))


STATUSES = {
    "first": 201,
    "replay": 201,
    "mismatch": 422,
    "malformed": 400,
    "view failed": 500,
    "held by another": 422,
    "damaged": 500,
    "quarantined": 500,
    "erased": 410,
    "over quota": 429,
}


@pytest.fixture
def bank(vault: Vault, request: pytest.FixtureRequest) -> Bank:
    return new_bank(vault, IDEMPOTENCY_QUOTA_RECORDS=3)


def spellings(bank: Bank) -> list[str]:
    """What must not be found, in every way that something of ours could write it."""
    digests = [key_of(bank, name).rid for name in (KEY, KEY + "-damaged")]
    written = [text for rid in digests for text in (rid.hex(), b64encode(rid).decode(), repr(rid)[2:-1])]
    return [*CANARIES, *written, *(urlsafe_b64encode(rid).decode().rstrip("=") for rid in digests)]


def test_66_nothing_that_is_emitted_or_stored_contains_a_canary(bank: Bank) -> None:
    """
    Logs of every logger at DEBUG, every signal, every answer that is ours: no key, principal, tenant, body or rid.
    Then every name, value, row and file of the store.
    """
    with listening() as ear:
        answers = go_everywhere(bank)

    assert STATUSES == {name: answer.status_code for name, answer in answers.items()}
    ours = [answers[name] for name in STATUSES if STATUSES[name] >= 400]
    emitted = [*ear.heard, *(f"{event!r} {asdict(event)}" for event in bank.events)]
    emitted += [f"{answer.headers} {answer.get_data(as_text=True)}" for answer in ours]
    assert len(bank.events) > 5
    found = [(canary, text) for canary in spellings(bank) for text in emitted if canary in text]
    assert [] == found

    dump = bank.vault.dump()
    assert len(dump) > 500
    assert [] == [canary for canary in CANARIES if canary.encode() in dump]
    assert b"paid" not in dump


def test_what_is_stored_contains_the_canaries_without_the_compliance_mode(vault: Vault) -> None:
    """The search finds what is there to be found."""
    bank = new_bank(vault, IDEMPOTENCY_ENCRYPTION="off", IDEMPOTENCY_COMPRESSION="off")
    pay(bank)
    dump = vault.dump()

    assert {PRINCIPAL, TENANT, ASKED, PLACE} == {canary for canary in CANARIES if canary.encode() in dump}


FACTS = {
    "response": (ASKED, PLACE),
    "key": (KEY,),
    "tenant": (TENANT,),
    "principal": (PRINCIPAL,),
    "request": ("canary-of-the-request",),
    "endpoint": ("canary_of_the_endpoint",),
    "item": ("canary-of-an-item",),
    "result": ("canary-of-a-result",),
    "arguments": ("canary-of-an-argument",),
    "step": ("canary-of-a-step",),
    "operator": ("canary-of-an-operator",),
    "reason": ("canary-of-a-reason",),
    "body of the message": ("canary-of-a-message",),
    "its key": ("canary-of-a-lane",),
    "its headers": ("canary-of-a-field",),
    "topic": ("canary-of-a-topic",),
    "message id": ("canary-of-an-id",),
}
"""The facts of the guide's table that a reader of the store would recognize, and what stands for each."""
TABLE = re.compile(r"^\|( `idempotency_[^|]*| – )\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One row of the guide's table: facts in the places of one kind."""

    encrypted: frozenset[str]
    digest: frozenset[str]
    readable: frozenset[str]


def guide() -> dict[str, Row]:
    """Return what the guide says, by SQL table and by the letter of Redis keys."""
    page = (Path(__file__).parents[2] / "docs/guides/encryption.md").read_text(encoding="utf-8")
    rows: dict[str, Row] = {}
    for tables, letters, *cells in TABLE.findall(page):
        row = Row(*(frozenset(re.sub(r"\(.*?\)", "", cell).strip().split(", ")) for cell in cells))
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", tables + letters), row)
    return rows


def publish(bank: Bank, outbox: Outbox) -> None:
    outbox.route("*", Sent())
    with bank.app.app_context():
        outbox.publish(
            "canary-of-a-topic",
            "canary-of-a-message",
            key="canary-of-a-lane",
            headers={"x-name": "canary-of-a-field"},
            message_id="canary-of-an-id",
            tenant=TENANT,
        )
        bank.app.extensions["sqlalchemy"].session.commit()


def fill(bank: Bank) -> None:
    """Leave something in every place: responses, a paused request with a step, an observed key, and an operator's change."""
    step, item, result = "canary-of-a-step", "canary-of-an-item", "canary-of-a-result"

    @bank.app.post("/orders", endpoint="canary_of_the_endpoint")
    @idempotent(steps=(step,))
    def order() -> tuple[str, int]:
        current_claim.step((step, item), lambda argument: {"ref": result}, "canary-of-an-argument")
        current_claim.step((step, "another"), lambda: 1 / 0)
        return "", 201

    @bank.app.post("/watched", endpoint="watched")
    @idempotent(mode="observe")
    def watch() -> str:
        return ""

    def post(path: str, key: str) -> int:
        client = bank.app.test_client(use_cookies=False)
        sent = {"Idempotency-Key": KEY + key, **WHO}
        return client.post(path, json={"wish": "canary-of-the-request"}, headers=sent).status_code

    if bank.vault.url is not None:
        publish(bank, bank.idempotency.outbox())
    assert [201, 201] == [pay(bank).status_code for _ in range(2)]
    assert [500, 200] == [post("/orders", "-paused"), post("/watched", "-watched")]
    who = ("--key", KEY + "-paused", "--tenant", TENANT, "--principal", PRINCIPAL)
    why = ("--reason", "canary-of-a-reason", "--actor", "canary-of-an-operator", "--yes")
    settled = bank.app.test_cli_runner().invoke(
        args=["idempotency", "resolve", *who, *why, "--step", step, "--item", "another", "--never-happened", "--force"]
    )
    assert 0 == settled.exit_code, settled.output
    assert bank.app.extensions["idempotency"].activity.flush()


@pytest.mark.parametrize("vault", ("redis", "sqlite", "postgresql", "tiered"), indirect=True)
def test_each_fact_is_where_the_guide_says(vault: Vault) -> None:
    """Encrypted, digested or readable, in each SQL table and each kind of Redis key, under `required`."""
    said = guide()
    bank = new_bank(vault)
    fill(bank)
    places = vault.places()

    found = {place: facts_in(held) for place, held in places.items()}
    # Where tables say nothing: pages that SQLite has not overwritten yet.
    readable = frozenset().union(*(row.readable for row in said.values()))
    assert found.pop(FILES, set()) <= readable
    assert {place: said[place].readable & FACTS.keys() for place in found} == found


@pytest.mark.parametrize("vault", ("redis", "sqlite"), indirect=True)
def test_what_the_guide_calls_encrypted_is_found_without_encryption(vault: Vault) -> None:
    """So the search above could find it."""
    fill(new_bank(vault, IDEMPOTENCY_ENCRYPTION="off", IDEMPOTENCY_COMPRESSION="off"))
    said, places = guide(), vault.places()

    for place in {"r", "s", "idempotency_records", "idempotency_steps", "idempotency_outbox"} & places.keys():
        assert said[place].encrypted & FACTS.keys() <= facts_in(places[place])


def facts_in(held: bytes) -> set[str]:
    return {fact for fact, canaries in FACTS.items() if any(canary.encode() in held for canary in canaries)}


def test_the_ear_hears() -> None:
    """A canary that is logged anywhere is found."""
    with listening() as ear:
        logging.getLogger("somebody.else").debug("paid by %s", PRINCIPAL)

    assert any(PRINCIPAL in text for text in ear.heard)
