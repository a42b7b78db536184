"""`flask idempotency seal`: plain answers become encrypted ones by a person's word only."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import Result
from flask import Flask

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import RecordCorrupt, ResponsesSealed
from tests.apps import World, new_world
from tests.cli.test_keys import NEW, OLD, disabled, run

SECRET = "a secret for tests that is longer than 32 bytes"


def shop(encryption: str, *, before: World | None = None, ring: Any = None) -> World:
    """An application after a restart with this setting, on the same store."""
    store = None if before is None else before.store
    ring = ring or (None if encryption == "off" else {"old": OLD})
    more: dict[str, Any] = {"allow_plaintext_transport": True} if encryption == "required" else {}
    world = new_world(
        Flask("tests.web.app"), store=store, encryption=encryption, key_ring=ring, secret=(SECRET,), **more
    )
    world.view()(lambda: "paid")
    return world


def seal(world: World, *more: str, typed: str | None = None) -> Result:
    arguments = ["idempotency", "seal", "--reason", "encryption is new", "--actor", "ops", *more]
    return world.app.test_cli_runner().invoke(args=arguments, input=typed)


def plain_records(world: World) -> int:
    return world.store.responses.count().get("", 0)


def test_answers_of_the_time_before_encryption_are_sealed_and_replayed() -> None:
    before = shop("off")
    before.post(key="a"), before.post(key="b")
    world = shop("on", before=before)
    told = seal(world, "--yes")

    assert (0, "Sealed: 2.\n") == (told.exit_code, told.output)
    assert {"old": 2} == world.store.responses.count()
    assert [ResponsesSealed("", "", actor="ops", reason="encryption is new", sealed=2, finished=True)] == world.told(
        ResponsesSealed
    )
    required = shop("required", before=before)
    assert ["true", "true"] == [required.post(key=key).headers.get("Idempotency-Replayed") for key in ("a", "b")]
    assert [] == required.runs


def test_it_asks_first_and_says_how_many_and_what_it_means() -> None:
    before = shop("off")
    before.post()
    world = shop("on", before=before)
    told = seal(world, typed="n\n")

    assert (1, 1, []) == (told.exit_code, plain_records(world), world.told(ResponsesSealed))
    assert "not encrypted: 1." in told.stderr
    assert "counts as genuine" in told.stderr
    assert (0, 0) == (seal(world, typed="y\n").exit_code, plain_records(world))


def test_it_needs_a_reason() -> None:
    world = shop("on")

    assert 2 == run(world, "seal", "--yes").exit_code


def test_under_required_a_planted_answer_is_refused_by_every_way_in() -> None:
    """What an attacker hopes for: that the beat, or the operator who does what `doctor` says, seals it."""
    before = shop("off")
    before.post(key="planted"), before.post(key="retried")
    world = shop("required", before=before, ring={"new": NEW, "old": OLD})
    refused = seal(world, "--yes")
    rotated = run(world, "rotate", "--json")
    advised = run(world, "doctor").output
    retry = world.post(key="retried")

    assert (1, True) == (refused.exit_code, "may have planted them" in refused.stderr)
    assert (0, 2, 0) == ((said := json.loads(rotated.stdout))["resealed"], said["plain"], said["unreadable"])
    assert "2 stored responses are not encrypted" in advised
    assert "run `flask idempotency rotate`" not in advised
    assert (500, "record-corrupt") == (retry.status_code, retry.get_json()["code"])
    assert ([], 1, []) == (world.runs, len(world.told(RecordCorrupt)), world.told(ResponsesSealed))
    assert 1 == plain_records(world)


@pytest.mark.parametrize(
    ("world", "why"),
    (
        pytest.param(lambda: shop("off"), "IDEMPOTENCY_ENCRYPTION is off", id="off"),
        pytest.param(lambda: shop("required"), "is required", id="required"),
        pytest.param(disabled, "IDEMPOTENCY_ENABLED is False", id="disabled"),
    ),
)
def test_where_nothing_may_be_sealed_it_is_refused(world: Any, why: str) -> None:
    told = seal(world(), "--yes")

    assert (1, "", True) == (told.exit_code, told.stdout, why in told.stderr)


def test_where_all_is_sealed_it_neither_asks_nor_tells() -> None:
    world = shop("on")
    world.post()
    told = seal(world)

    assert (0, "Every stored response is encrypted. There is nothing to seal.\n") == (told.exit_code, told.output)
    assert [] == world.told(ResponsesSealed)


def test_what_was_sealed_before_the_store_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit event says so, and that it is not all."""
    before = shop("off")
    before.post(key="a"), before.post(key="b")
    world = shop("on", before=before)
    write, calls = type(world.store.responses).replace, list[int]()

    def failing(self: Any, *arguments: Any) -> bool:
        calls.append(1)
        if len(calls) > 1:
            raise StoreUnavailable("no answer")
        return write(self, *arguments)

    monkeypatch.setattr(type(world.store.responses), "replace", failing)
    told = seal(world, "--yes", "--json")
    (event,) = world.told(ResponsesSealed)

    assert (2, {"error": "no answer"}) == (told.exit_code, json.loads(told.stdout))
    assert isinstance(event, ResponsesSealed)
    assert (1, False) == (event.sealed, event.finished)


def test_a_damaged_answer_is_counted_and_left() -> None:
    before = shop("off")
    before.post()
    room = before.store.ledger._shared
    ((key, record),) = room.records.items()
    assert record.payload is not None
    room.records[key] = replace(record, payload=replace(record.payload, data=record.payload.data[::-1]))
    told = seal(shop("on", before=before), "--yes")

    assert (1, True) == (told.exit_code, "Damaged, and left as they are: 1." in told.output)
