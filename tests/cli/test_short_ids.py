"""The start of an id instead of all of it: what `list` prints, and what `show`, `release` and `resolve` take."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from flask_idempotency.assembly import identities
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import RequestInfo, StoredPayload
from flask_idempotency.operations import records
from flask_idempotency.operations.records import handle_of, short_ids
from flask_idempotency.testing.contract.support import a_request, a_token, granted
from tests.apps import WHY, World, refusal, run, said, store_named, world_on
from tests.lab.programs import REDIS_KINDS

PREFIX = bytes((1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
"""The start of a record id: 16 characters of its handle."""
START = "aebagbafaydqqcik"


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A shop on the store that a test names, or in memory."""
    request.param = getattr(request, "param", "memory")
    return world_on(store_named(request, tmp_path))


on_each_store = pytest.mark.parametrize("world", ("memory", "sqlite", REDIS_KINDS[0]), indirect=True)


def plant(world: World, start: bytes, *, state: str = "processing", endpoint: str = "pay", owned: bool = True) -> str:
    """Put a record into the store whose id starts so, and return its handle."""
    parts = world.app.extensions["idempotency"]
    who, store = identities(parts.settings)[0], parts.built.engine._deps.store
    (tid,) = who.tenant_ids(parts.settings.namespace, "acme")
    key = StorageKey(start + os.urandom(32 - len(start)), tid)
    token = ((who.mark(parts.settings.namespace) if owned else b"") + a_token())[:16]
    asked = a_request(key, about=RequestInfo("acme", "alice", "POST", endpoint))
    granted(store.claim(replace(asked), token=token, lease=30.0))
    if state == "quarantined":
        store.quarantine(key, token, "status-500")
    elif state == "completed":
        store.complete(key, token, StoredPayload(b"", 201, success=True, byte_size=0), keep=60.0)
    return handle_of(key)


@on_each_store
def test_a_list_prints_more_where_eight_are_not_unique(world: World) -> None:
    """As many as tell the records apart, and the others keep their eight."""
    near = [plant(world, PREFIX + bytes((number << 3,))) for number in (0, 1)]
    far = plant(world, b"\xff" * 10)

    ids = {line.split()[0] for line in run(world, "list").output.splitlines()[1:]}

    assert {near[0][:17], near[1][:17], far[:8]} == ids
    for printed in ids:
        assert said(run(world, "show", printed, "--json"))["handle"].startswith(printed)


@on_each_store
def test_a_unique_start_of_four_or_more_characters_names_an_unfinished_record(world: World) -> None:
    """Also in capitals, and beside others."""
    unfinished = [plant(world, PREFIX), plant(world, b"\xff" * 10, state="quarantined")]
    plant(world, b"\x80" * 10, state="completed")

    for handle, length in product(unfinished, (4, 5, 8, 16, 76)):
        assert handle == said(run(world, "show", handle[:length].upper(), "--json"))["handle"], length


@on_each_store
def test_release_and_resolve_take_a_start_too(world: World) -> None:
    one, other = plant(world, PREFIX, state="quarantined"), plant(world, b"\xff" * 10, state="quarantined")

    released = run(world, "release", one[:8], *WHY, "--yes", "--force")
    resolved = run(world, "resolve", other[:8], "--happened", "--status", "201", *WHY, "--yes")

    assert (0, 0) == (released.exit_code, resolved.exit_code), released.output + resolved.output
    assert "completed" == said(run(world, "show", other, "--json"))["state"]
    assert "There is no record with this id" in refusal(run(world, "show", one))


@pytest.mark.parametrize("command", (("release", "--force"), ("resolve", "--never-happened")), ids=" ".join)
def test_less_than_eight_characters_change_no_record(world: World, command: tuple[str, ...]) -> None:
    """Once the meant record is gone, four characters begin the id of another one too often."""
    handle = plant(world, PREFIX, state="quarantined")

    assert "8 to change one" in refusal(run(world, command[0], handle[:7], *command[1:], *WHY, "--yes"))
    assert "quarantined" == said(run(world, "show", handle[:4], "--json"))["state"]


@pytest.mark.parametrize(
    "command", (("show",), ("release", *WHY, "--yes", "--force"), ("resolve", "--never-happened", *WHY, "--yes"))
)
def test_an_ambiguous_start_changes_nothing_and_lists_the_candidates(world: World, command: tuple[str, ...]) -> None:
    """By an id that names each alone, its state and its endpoint, what needs an operator first."""
    running = plant(world, PREFIX + bytes((0,)))
    held = plant(world, PREFIX + bytes((1 << 3,)), state="quarantined", endpoint="refund\n\x1b[2J")
    before = said(run(world, "list", "--json"))["records"]

    told = refusal(run(world, command[0], START[:8], *command[1:]))

    assert [
        "2 records have an id that begins so. Name one of them:",
        f"  {held[:17]}  quarantined  refund\\n\\x1b[2J",
        f"  {running[:17]}  in flight  pay",
    ] == told.splitlines()
    assert [each["state"] for each in before] == [
        each["state"] for each in said(run(world, "list", "--json"))["records"]
    ]


def test_of_many_candidates_ten_are_listed(world: World) -> None:
    for number in range(12):
        plant(world, PREFIX[:2] + bytes((number,)))

    told = refusal(run(world, "show", START[:4])).splitlines()

    assert ("12 records have an id that begins so. Name one of them:", 12, "  and 2 more") == (
        told[0],
        len(told),
        told[-1],
    )


def test_a_start_of_less_than_eight_characters_reads_no_completed_record(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may hold millions. The error says how to name them."""
    handle = plant(world, PREFIX, state="completed")
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 0)

    told = refusal(run(world, "show", handle[:7]))

    assert "No unfinished record has an id that begins so" in told
    assert "by its whole id or by --key" in told
    assert handle == said(run(world, "show", handle, "--json"))["handle"]


@on_each_store
def test_eight_characters_name_a_completed_record_of_a_store_with_few(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = plant(world, PREFIX, state="completed")
    assert handle == said(run(world, "show", handle[:8], "--json"))["handle"]

    monkeypatch.setattr(records, "MOST_LOOKED_AT", 0)
    assert "whole id or by --key" in refusal(run(world, "show", handle[:8]))


def test_an_unfinished_record_is_found_beside_any_number_of_completed_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id that `list` prints. A search of the completed records would be refused."""
    handle = plant(world, PREFIX)
    plant(world, b"\xff" * 10, state="completed")
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 0)

    assert handle == said(run(world, "show", handle[:8], "--json"))["handle"]


def test_a_start_that_is_also_an_id_from_a_log_is_ambiguous(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator may mean either, so neither is chosen."""
    handle, other = plant(world, PREFIX), plant(world, b"\xff" * 10)
    labels = {handle: "zzzzzzzz", other: START[:8]}
    who = type(identities(world.app.extensions["idempotency"].settings)[0])
    monkeypatch.setattr(who, "label", lambda self, key: labels[handle_of(key)])

    told = refusal(run(world, "show", START[:8]))

    assert (True, True) == (f"  {handle[:8]}  in flight" in told, f"  {other[:8]}  in flight" in told)


def test_a_start_names_records_of_the_named_tenant_only(world: World) -> None:
    handle = plant(world, PREFIX)

    assert "No unfinished record" in refusal(run(world, "show", handle[:4], "--tenant", "globex"))
    assert handle == said(run(world, "show", handle[:4], "--tenant", "acme", "--json"))["handle"]


def test_a_record_of_another_application_is_not_released_by_a_start_either(world: World) -> None:
    handle = plant(world, PREFIX, state="quarantined", owned=False)

    told = refusal(run(world, "release", handle[:8], *WHY, "--yes", "--force"))

    assert "another application" in told
    assert "quarantined" == said(run(world, "show", handle, "--json"))["state"]


def test_an_id_is_as_short_as_it_may_be() -> None:
    cases: tuple[tuple[list[str], list[int]], ...] = (
        ([], []),
        (["a" * 77], [8]),
        (["a" * 77, "b" * 77], [8, 8]),
        (["a" * 77, "a" * 8 + "b" * 69], [9, 9]),
        (["a" * 77, "a" * 10 + "b" * 67, "a" * 20 + "b" * 57], [21, 11, 21]),
        (["a" * 77, "a" * 76 + "b"], [77, 77]),
    )
    for handles, lengths in cases:
        ids = short_ids(handles)
        assert lengths == [len(ids[handle]) for handle in handles]
        assert all(1 == sum(handle.startswith(short) for handle in handles) for short in ids.values())
