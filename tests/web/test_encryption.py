"""Encryption at rest, from the settings to the stored bytes, and the facts stored in clear beside them."""

from __future__ import annotations

import logging
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
from flask import Flask
from flask_login import LoginManager  # type: ignore[import-untyped]

from flask_idempotency import Idempotency, current_claim
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import Record, RequestInfo, State, StoredPayload
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from tests.apps import LONG, FaultyMemory, World, is_replay, new_world, who

RING = {"2026-11": b64encode(b"n" * 32).decode(), "2025-11": b64encode(b"o" * 32).decode()}
CARD = "4242 4242 4242 4242"


def shop(encryption: str = "on", *, store: Any = None, **settings: Any) -> World:
    settings = {"key_ring": RING, "allow_plaintext_transport": True, "secret": LONG, **settings}
    world = new_world(store=store, encryption=encryption, tenant=lambda: "acme", **settings)

    @world.view()
    def pay() -> tuple[str, int, dict[str, str]]:
        world.runs.append(1)
        return CARD * 100, 201, {"Location": "/payments/17"}

    return world


def payload(world: World) -> StoredPayload:
    record = world.record()
    assert record is not None
    assert record.payload is not None
    return record.payload


@pytest.mark.parametrize("mode", ("on", "required"))
def test_stored_bytes_reveal_nothing_and_are_replayed(mode: str) -> None:
    """Status, headers and body are sealed together, under the newest key of the ring."""
    world = shop(mode)

    first, again = world.post(), world.post()

    assert (True, first.data, "/payments/17") == (is_replay(again), again.data, again.headers["Location"])
    stored = payload(world)
    assert stored.sealed_by is not None
    assert "2026-11" == stored.sealed_by.kid
    assert CARD.encode() not in stored.data
    assert len(stored.data) > len(CARD) * 100, "it is not compressed"


def test_off_is_plain_and_small() -> None:
    """A ring alone encrypts nothing."""
    world = shop("off")

    world.post()

    assert None is payload(world).sealed_by
    assert len(payload(world).data) < len(CARD) * 20


def test_a_sealed_response_still_opens_after_encryption_is_switched_off() -> None:
    """As long as the ring is there."""
    before = shop()
    before.post()
    after = shop("off", store=before.store)

    assert (True, []) == (is_replay(after.post()), after.runs)


def test_without_its_ring_it_never_runs_and_is_not_harmed() -> None:
    """One host may lack the ring. Its retries wait, and the others replay."""
    before = shop()
    before.post()
    after = shop("off", store=before.store, key_ring=None, on_store_down="allow")

    assert (503, "store-unavailable") == ((answer := after.post()).status_code, answer.get_json()["code"])
    assert ([], True) == (after.runs, is_replay(before.post()))


def test_required_opens_no_response_that_is_not_sealed() -> None:
    """An attacker who can write to the store could put one there. `on` opens it, while older responses live."""
    before = shop("off")
    before.post()

    assert is_replay(shop("on", store=before.store).post())
    refused = shop("required", store=before.store).post()

    assert (500, "record-corrupt") == (refused.status_code, refused.get_json()["code"])


@pytest.mark.parametrize("mode", ("off", "on", "required"))
def test_names_are_in_clear_unless_they_are_hashed(mode: str) -> None:
    """Hashed when encryption is required: the same for the same name, and under the newest secret."""
    world = shop(mode)
    world.post()

    record = world.record()
    assert record is not None
    names = (record.info.tenant, record.info.principal)
    identity = Identity(LONG.encode())
    hashed = (identity.pseudonym("acme"), identity.pseudonym("alice"))
    assert (hashed if mode == "required" else ("acme", "alice")) == names


def test_the_view_always_sees_real_names() -> None:
    """Only the record is hashed."""
    world = shop("required")
    told: list[Any] = []

    @world.view("/who")
    def tell() -> str:
        told.append((current_claim.tenant, current_claim.principal))
        return "ok"

    world.post("/who")

    assert [("acme", "alice")] == told


def test_a_missing_principal_is_not_hashed() -> None:
    world = new_world(init=False, hash_identities=True, principal=lambda: None)
    world.idempotency.init_app(world.app)
    world.view()(lambda: "ok")

    world.post()

    record = world.record()
    assert record is not None
    assert ("", "") == (record.info.tenant, record.info.principal)


def test_a_store_that_keeps_no_data_keys_is_refused() -> None:
    """Even if a function makes the store, as soon as it runs."""
    for store in (FaultyStore(MemoryStore()), "tests.web.test_encryption:bare"):
        with pytest.raises(ConfigurationError, match=r"the store \(FaultyStore\) cannot keep the data keys"):
            Idempotency(
                Flask("shop"), store=store, secret="only-tests-9f2c47d1e8b35a60c1d47be2", encryption="on", key_ring=RING
            )


def bare() -> FaultyStore:
    """Return a store without data keys."""
    return FaultyStore(MemoryStore())


@pytest.mark.parametrize("how", ("argument", "decorator", "flask-login"))
def test_required_accepts_every_source_of_principals(how: str) -> None:
    """As long as the application sets it up before its first request."""
    app, settings = (
        Flask("shop"),
        {
            "encryption": "required",
            "secret": "only-tests-9f2c47d1e8b35a60c1d47be2",
            "store": MemoryStore(),
            "key_ring": RING,
        },
    )
    app.config["SECRET_KEY"] = "s"
    idempotency = Idempotency(principal=who if how == "argument" else None, **settings)  # type: ignore[arg-type]
    if how == "decorator":
        idempotency.principal_loader(who)
    if how == "flask-login":
        LoginManager(app)

    idempotency.init_app(app)


def test_required_without_a_source_of_principals_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the application cannot name its callers"):
        Idempotency(
            Flask("shop"),
            encryption="required",
            secret="only-tests-9f2c47d1e8b35a60c1d47be2",
            store=MemoryStore(),
            key_ring=RING,
        )


def test_the_start_logs_the_encryption_mode(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO, once, with no key and no secret."""
    with caplog.at_level(logging.INFO, logger="flask_idempotency"):
        shop("required", secret="canary-9f2c47d1e8b35a60c1d47be2a5583f09", quota_records=5)

    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith("tests.web.app: store FaultyMemory; encryption required, newest key 2026-11, 2 in the ring")
    assert "quotas records 5" in line
    assert not any(secret in caplog.text for secret in ("canary", *RING.values()))


def test_erased_responses_are_410_and_new_keys_are_sealed_with_new_keys() -> None:
    """Crypto-shredding, as a client sees it."""
    world = shop()
    world.post(key="before")
    world.store.data_keys.shred(world.store.calls[-1].key.tid)
    world.clock.advance(1)

    answers = [world.post(key=key) for key in ("before", "after", "after")]

    assert [410, 201, 201] == [answer.status_code for answer in answers]
    assert (True, 2, State.COMPLETED) == (is_replay(answers[2]), len(world.runs), world.state())


ONE_KEY = {"a": b64encode(b"a" * 32).decode()}


def paid() -> tuple[World, MemoryStore]:
    """A completed payment, and a store that an attacker can write to."""
    clock = FrozenClock()
    memory = MemoryStore(clock=clock)
    world = new_world(
        Flask("tests.web.app"),
        store=FaultyMemory(memory),
        encryption="required",
        key_ring=ONE_KEY,
        hash_identities=False,
        allow_plaintext_transport=True,
    )
    world.clock = clock

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid", 201

    world.post()
    return world, memory


def changed(memory: MemoryStore, **facts: Any) -> Record:
    """Replace facts of the one record or of its payload."""
    ((key, record),) = memory._shared.records.items()
    payload = record.payload
    assert payload is not None
    of_payload = {name: facts.pop(name) for name in list(facts) if name in StoredPayload.__slots__}
    forged = replace(record, payload=replace(payload, **of_payload), **facts)
    memory._shared.records[key] = forged
    return forged


@pytest.mark.parametrize(
    "facts",
    ({"status": 200}, {"success": False}, {"byte_size": 5}, {"fence": 99}, {"token": b"x" * 16}),
    ids=lambda facts: next(iter(facts)),
)
def test_bound_facts_cannot_be_changed(facts: dict[str, Any]) -> None:
    """The response does not open any more, and no view runs."""
    world, memory = paid()
    changed(memory, **facts)

    assert (500, [1]) == (world.post().status_code, world.runs)


def test_names_times_and_attempts_are_not_bound_and_a_guard_sees_them_forged() -> None:
    """The page warns of it: a guard that decides by them decides by what an attacker may have written."""
    world, memory = paid()
    seen: list[Record] = []

    @world.idempotency.replay_guard
    def guard(record: Record) -> bool:
        seen.append(record)
        return True

    forged = changed(memory, info=RequestInfo("other", "mallory", "GET", "refund"), requested_at=1.0, attempt=99)

    assert (True, [1]) == (is_replay(world.post()), world.runs)
    (record,) = seen
    assert (forged.info, 1.0, 99) == (record.info, record.requested_at, record.attempt)


def test_the_end_of_a_life_is_not_bound_and_a_key_whose_life_is_over_is_new() -> None:
    """As if its record were deleted: an attacker who can write to the store can repeat a payment."""
    world, memory = paid()
    changed(memory, deadline=world.clock.now - 1)

    assert (False, [1, 1]) == (is_replay(world.post()), world.runs)
