"""What stands in clear beside an encrypted answer, in the hands of somebody who can write to the store: docs/encryption.md."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
from flask import Flask

from flask_idempotency.engine.model import Record, RequestInfo, StoredPayload
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.web.apps import FaultyMemory, World, is_replay, new_world

RING = {"a": b64encode(b"a" * 32).decode()}


def paid() -> tuple[World, MemoryStore]:
    """A payment that was answered, and the store that somebody else can write to."""
    clock = FrozenClock()
    memory = MemoryStore(clock=clock)
    world = new_world(
        Flask("tests.web.app"),
        store=FaultyMemory(memory),
        encryption="required",
        key_ring=RING,
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
    """The one record with these facts, which are the payload's or its own."""
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
def test_what_is_bound_cannot_be_changed(facts: dict[str, Any]) -> None:
    """The answer does not open any more, and nothing runs."""
    world, memory = paid()
    changed(memory, **facts)

    assert (500, [1]) == (world.post().status_code, world.runs)


def test_names_times_and_attempts_are_not_bound_and_a_guard_sees_them_forged() -> None:
    """The page warns of it: a guard that decides by them decides by what somebody else has written."""
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
    """As one whose record was deleted: who can write to the store can have a payment made again."""
    world, memory = paid()
    changed(memory, deadline=world.clock.now - 1)

    assert (False, [1, 1]) == (is_replay(world.post()), world.runs)
