"""Somebody else wrote to the store: 500 and quarantine, on every store, and never a second run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.engine.events import RecordCorrupt
from flask_idempotency.engine.model import CORRUPT, Record, SealedBy, State, StoredPayload
from flask_idempotency.stores.redis import layout
from tests.compliance.conftest import Bank
from tests.lab.redis import connect

pytestmark = pytest.mark.slow
Changed = Callable[[Record, StoredPayload], Record]


def with_payload(**changes: Any) -> Changed:
    return lambda record, payload: replace(record, payload=replace(payload, **changes))


def flipped(record: Record, payload: StoredPayload) -> Record:
    data = bytearray(payload.data)
    data[len(data) // 2] ^= 1
    return replace(record, payload=replace(payload, data=bytes(data)))


CHANGES: dict[str, Changed] = {
    "flipped": flipped,
    "truncated": lambda record, payload: with_payload(data=payload.data[:-1])(record, payload),
    "emptied": with_payload(data=b""),
    "under an unknown key": with_payload(sealed_by=SealedBy("2019-01", 1)),
    "under an unknown number": with_payload(sealed_by=SealedBy("2026-11", 7)),
    "of an unknown version": lambda record, payload: with_payload(data=b"\xf1" + payload.data[1:])(record, payload),
    "as if it were plain": with_payload(sealed_by=None),
    "planted": with_payload(data=b"\x10\x00\x00\x00\x00200\r\n\r\nall yours", sealed_by=None),
    "with another status": with_payload(status=200),
    "of another size": with_payload(byte_size=1),
    "said to have failed": with_payload(success=False),
    "of another claim": lambda record, payload: replace(record, token=bytes(16)),
    "of another incarnation": lambda record, payload: replace(record, fence=record.fence + 1),
}


def assert_condemned(bank: Bank, key: str = "k") -> None:
    bank.events.clear()
    answers = [bank.pay(key) for _ in range(2)]

    told = [(each.status_code, each.get_json().get("code")) for each in answers]
    assert [(500, "record-corrupt")] * 2 == told, key
    assert 1 == bank.runs.count(key), key
    assert bank.told(RecordCorrupt) >= 1, key
    record = bank.store.read(bank.key_of(key))
    assert record is not None
    assert (State.QUARANTINED, CORRUPT) == (record.state, record.reason), key


def test_64_a_changed_answer_is_quarantined_and_not_run_again(bank: Bank) -> None:
    for key, change in CHANGES.items():

        def changed(record: Record, change: Changed = change) -> Record:
            assert record.payload is not None
            return change(record, record.payload)

        key = key.replace(" ", "-")
        assert 201 == bank.pay(key).status_code
        bank.vault.forge(bank.key_of(key), changed)

        assert_condemned(bank, key)


@pytest.mark.parametrize("tenant", ("acme", "globex"), ids=("of the same tenant", "of another tenant"))
def test_64_an_answer_in_anothers_place_is_quarantined(bank: Bank, tenant: str) -> None:
    """Both were sealed by us, under keys that are there. Each opens in its own record only."""
    bank.pay()
    bank.pay("other", **{"X-Tenant": tenant}, to="globex")
    other = bank.store.read(bank.key_of("other", tenant=tenant))
    assert other is not None

    def swapped(record: Record) -> Record:
        return replace(record, payload=other.payload)

    def moved_with_its_claim(record: Record) -> Record:
        return replace(swapped(record), token=other.token, fence=other.fence)

    bank.vault.forge(bank.key_of(), moved_with_its_claim)
    assert_condemned(bank)


def test_64_an_answer_of_an_earlier_life_is_quarantined(bank: Bank) -> None:
    """Kept by whoever could read the store, and put back into the key's next life."""
    bank.pay("first")
    first = bank.store.read(bank.key_of("first"))
    assert first is not None
    # The same key again, as after its expiry: another fence and another token.
    bank.vault.forge(
        bank.key_of("first"), lambda record: replace(record, fence=record.fence + 5, token=bytes(range(16)))
    )

    assert_condemned(bank, "first")


def test_64_a_record_that_nobody_can_read_is_never_a_miss(bank: Bank) -> None:
    bank.pay()
    bank.vault.garble(bank.key_of())
    answers = [bank.pay() for _ in range(2)]

    assert [(500, "record-corrupt")] * 2 == [(each.status_code, each.get_json()["code"]) for each in answers]
    assert (1, 2) == (len(bank.runs), bank.told(RecordCorrupt))


def test_what_was_not_touched_is_replayed(bank: Bank) -> None:
    first = bank.pay()
    bank.vault.forge(bank.key_of(), lambda record: record)
    again = bank.pay()

    assert (201, first.data, "true") == (again.status_code, again.data, again.headers["Idempotency-Replayed"])
    assert 0 == bank.told(RecordCorrupt)


@pytest.mark.parametrize("vault", ("redis",), indirect=True)
@pytest.mark.parametrize(
    "spelling", (b"\x80" * 400_000 + b"\x01", b"\xff" * 9, b"\x80\0"), ids=("long", "large", "odd")
)
def test_64_a_planted_length_costs_one_refusal_and_no_run(bank: Bank, spelling: bytes) -> None:
    """Where the size of the answer stands. It took 40 seconds of processor time for each retry."""
    bank.pay()
    name = layout.keys(bank.key_of())[0]
    with connect(bank.vault.config["IDEMPOTENCY_STORE"]) as client:
        held: Any = client.get(name)
        at = 80 + int.from_bytes(held[77:80], "big")
        client.set(name, held[:at] + spelling + held[at + 2 :])
        answers = [bank.pay() for _ in range(2)]

        assert -1 == client.pttl(name)
    assert [(500, "record-corrupt")] * 2 == [(each.status_code, each.get_json()["code"]) for each in answers]
    assert (1, 1) == (len(bank.runs), bank.told(RecordCorrupt))
