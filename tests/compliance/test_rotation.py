"""Keys of the ring are changed under load, and a tenant is erased while its requests run: on every store."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotency.engine.events import ErasedRefused, RecordCorrupt
from flask_idempotency.engine.model import State
from tests.compliance.conftest import Bank, new_bank
from tests.compliance.vaults import Vault

pytestmark = pytest.mark.slow

OLD, NEW = ("old:" + base64.b64encode(b"o" * 32).decode(), "new:" + base64.b64encode(b"n" * 32).decode())
KNOWN, READERS = 12, 2


def run(bank: Bank, *arguments: str) -> Any:
    result = bank.app.test_cli_runner().invoke(args=["idempotency", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def under_load(banks: list[Bank], task: Callable[[], None]) -> list[tuple[int, str, str]]:
    """Every answer that was not what it had to be while the task ran: each payment known before, and new ones."""
    over, wrong = threading.Event(), list[tuple[int, str, str]]()

    def use(bank: Bank, reader: int) -> None:
        number = 0
        while not over.is_set() or number < KNOWN:
            number += 1
            for key, status in ((f"known-{number % KNOWN}", "true"), (f"new-{reader}-{number}", None)):
                answer = bank.pay(key, to=key)
                told = answer.status_code, answer.get_data(as_text=True), answer.headers.get("Idempotency-Replayed")
                if told != (201, f'{{"paid": "{key}"}}', status):
                    wrong.append((told[0], told[1], str(told[2])))

    threads = [
        threading.Thread(target=use, args=(bank, number * READERS + reader))
        for number, bank in enumerate(banks)
        for reader in range(READERS)
    ]
    for thread in threads:
        thread.start()
    try:
        task()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return wrong


def test_43_keys_are_rotated_under_load_and_no_replay_fails(vault: Vault) -> None:
    before = new_bank(vault, IDEMPOTENCY_KEY_RING=f"{OLD},{NEW}")
    after = new_bank(vault, IDEMPOTENCY_KEY_RING=f"{NEW},{OLD}")
    for number in range(KNOWN):
        before.pay(f"known-{number}", to=f"known-{number}")
    reports = []

    assert [] == under_load([before, after], lambda: reports.append(run(after, "rotate", "--json")))
    assert reports[0]["resealed"] >= KNOWN
    # Whoever has the old ring seals under it until it is restarted; then nothing is left there.
    run(after, "rotate", "--json")
    keys = {key["kid"]: key["records"] for key in run(after, "keys", "status", "--json")["keys"]}
    assert 0 == keys["old"]
    only = new_bank(vault, IDEMPOTENCY_KEY_RING=NEW)
    assert ["true"] * KNOWN == [
        only.pay(f"known-{number}", to=f"known-{number}").headers.get("Idempotency-Replayed") for number in range(KNOWN)
    ]
    assert 0 == sum(bank.told(RecordCorrupt) for bank in (before, after, only))


@pytest.mark.parametrize("vault", ("tiered",), indirect=True)
def test_a_cached_copy_from_before_the_rotation_is_not_reported_as_corrupt(vault: Vault) -> None:
    """A replay reads the response, `rotate` replaces it and drops the cached copy, and then the replay caches what it read."""
    before = new_bank(vault, IDEMPOTENCY_KEY_RING=OLD)
    before.pay(to="first"), before.pay(to="first")
    tiered: Any = before.store
    cache, key = tiered._cache, tiered._cache_key(before.key_of())
    cached = cache.get(key)
    run(new_bank(vault, IDEMPOTENCY_KEY_RING=f"{NEW},{OLD}"), "rotate", "--json")
    after = new_bank(vault, IDEMPOTENCY_KEY_RING=NEW)
    cache.put(key, cached, missed_at=cache.get(key).at)
    answers = [after.pay(to="first") for _ in range(2)]

    assert [("true", '{"paid": "first"}')] * 2 == [
        (each.headers["Idempotency-Replayed"], each.text) for each in answers
    ]
    assert 0 == after.told(RecordCorrupt)


def test_67_an_erased_tenant_is_erased_for_every_process_at_once(vault: Vault) -> None:
    banks = [new_bank(vault), new_bank(vault)]
    for bank in banks:
        bank.pay("mine"), bank.pay("other", **{"X-Tenant": "globex"})
    destroyed = run(banks[0], "purge", "--tenant", "acme", "--shred", "--reason", "they have left", "--yes", "--json")[
        "data_keys"
    ]
    answers = [bank.pay("mine") for bank in banks for _ in range(2)]

    assert destroyed >= 1
    assert [(410, "response-erased")] * 4 == [(each.status_code, each.get_json()["code"]) for each in answers]
    assert [201, 201] == [bank.pay("other", **{"X-Tenant": "globex"}).status_code for bank in banks]
    assert (["mine", "other"], []) == (banks[0].runs, banks[1].runs)
    assert 4 == sum(bank.told(ErasedRefused) for bank in banks)


def test_67_a_payment_in_flight_cannot_bring_an_erased_tenant_back(vault: Vault) -> None:
    """It is answered, for it was made; and from then on its retries are told that nothing was kept."""
    bank = new_bank(vault)
    bank.during = lambda: run(
        bank, "purge", "--tenant", "acme", "--shred", "--reason", "they have left", "--yes", "--json"
    )
    first = bank.pay("mine", to="a secret")
    bank.during = None
    retry = bank.pay("mine", to="a secret")
    record = bank.store.read(bank.key_of("mine"))

    assert (201, '{"paid": "a secret"}') == (first.status_code, first.get_data(as_text=True))
    assert (410, ["mine"]) == (retry.status_code, bank.runs)
    assert record is not None
    assert record.payload is not None
    assert (State.COMPLETED, b"") == (record.state, record.payload.data)


def test_an_erased_tenant_may_come_back(vault: Vault) -> None:
    """With keys that it has not used before."""
    bank = new_bank(vault)
    bank.pay("before")
    run(bank, "purge", "--tenant", "acme", "--shred", "--reason", "they have left", "--yes", "--json")
    answers = [bank.pay(key).status_code for key in ("before", "after", "after")]

    assert ([410, 201, 201], ["before", "after"]) == (answers, bank.runs)
