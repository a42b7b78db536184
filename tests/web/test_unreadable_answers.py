"""Answers that are there and cannot be given: erased ones, and damaged ones. Neither is ever run again."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.events import ErasedRefused, RecordCorrupt
from flask_idempotency.engine.model import CORRUPT, Record, State, StoredPayload, StoredResponse
from tests.web.apps import World, new_world


def paid(**options: object) -> World:
    """A payment that was made once, with its answer kept."""
    world = new_world(**options)  # type: ignore[arg-type]

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid", 201

    assert 201 == world.post().status_code
    return world


def kept(world: World) -> Record:
    record = world.record()
    assert record is not None
    return record


def spoil(world: World, data: bytes) -> None:
    """Somebody has written to the store."""
    payload = kept(world).payload
    assert payload is not None
    spoilt = StoredPayload(data, payload.status, payload.success, payload.byte_size)
    assert world.store.responses.replace(world.store.calls[-1].key, payload, spoilt)


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens from now on must not be sent: a header field would end early."""

    def opened(self: EnvelopeCodec, *sealed: Any) -> StoredResponse:
        return StoredResponse(201, metadata=(("Location", "/1\r\nSet-Cookie: admin=1"),))

    monkeypatch.setattr(EnvelopeCodec, "open", opened)


def test_an_erased_answer_is_410_and_never_run() -> None:
    """Whether it was sealed or not; each time, and told."""
    world = paid()
    world.store.data_keys.shred(world.store.calls[-1].key.tid)

    answers = [world.post() for _ in range(2)]

    assert [(410, "response-erased")] * 2 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (2, [1]) == (len(world.told(ErasedRefused)), world.runs)
    assert all("Retry-After" not in answer.headers for answer in answers)


def test_a_damaged_answer_is_500_each_time_and_quarantined() -> None:
    """Time does not end it: the key of a payment that was made never becomes new."""
    world = paid()
    spoil(world, b"rubbish")

    answers = [world.post() for _ in range(3)]
    world.clock.advance(100 * 24 * 3600)
    answers.append(world.post())

    assert [(500, "record-corrupt")] * 4 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (State.QUARANTINED, CORRUPT) == (kept(world).state, kept(world).reason)
    assert (1, [1]) == (len(world.told(RecordCorrupt)), world.runs)


def test_an_answer_that_must_not_be_sent_is_quarantined_too(splitting: None) -> None:
    """It opens, and still nobody may be given it: found out once, told once."""
    world = paid()

    answers = [world.post() for _ in range(2)]

    assert [(500, "record-corrupt")] * 2 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (State.QUARANTINED, CORRUPT) == (kept(world).state, kept(world).reason)
    assert (1, [1]) == (len(world.told(RecordCorrupt)), world.runs)


def test_during_a_rotation_it_is_quarantined_under_the_secret_it_was_kept_with(splitting: None) -> None:
    """The newest secret's key has no record to condemn."""
    world = paid()
    key = world.store.calls[-1].key
    rotated = new_world(Flask("tests.web.app"), secret=["new", "s"], store=world.store)
    rotated.view()(lambda: "never")

    assert 500 == rotated.post().status_code

    record = world.store.read(key)
    assert record is not None
    assert (State.QUARANTINED, CORRUPT) == (record.state, record.reason)


def test_a_store_that_is_gone_by_then_changes_nothing_for_the_caller(splitting: None) -> None:
    """The answer is still damaged, and the next retry will find it out again."""
    world = paid(on_store_down="allow")
    world.store.lose_request("mark_corrupt")

    answer = world.post()

    assert (500, "record-corrupt") == (answer.status_code, answer.get_json()["code"])
    assert ([1], State.COMPLETED) == (world.runs, kept(world).state)


@pytest.mark.parametrize("lost", ("key", "mark_corrupt", "read"))
def test_what_was_done_is_not_run_again_although_views_may_run_without_a_store(
    lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key service that is away while an answer is opened, or a store that goes while a damaged one is looked at."""
    world = paid(on_store_down="allow")

    def opened(self: EnvelopeCodec, *sealed: Any) -> StoredResponse:
        raise StoreUnavailable("no answer") if lost == "key" else CorruptRecord("damaged")

    monkeypatch.setattr(EnvelopeCodec, "open", opened)
    if lost != "key":
        world.store.lose_request(lost)

    answer = world.post()

    assert (503, "store-unavailable") == (answer.status_code, answer.get_json()["code"])
    assert ("2", [1]) == (answer.headers["Retry-After"], world.runs)
