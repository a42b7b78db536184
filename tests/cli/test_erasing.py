"""`flask idempotency purge` without --shred: nothing readable of a tenant's answers is left in the store."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, request

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import TenantErased
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import ERASED, State
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import (
    WHY,
    FaultyMemory,
    World,
    key_of,
    lapsed,
    new_world,
    paid,
    record,
    refusal,
    run,
    said,
    shop,
    vanished,
)

PURGE = ("purge", "--tenant", "acme", *WHY, "--yes")
RING = {"a": b64encode(b"a" * 32).decode()}
MODES: tuple[dict[str, Any], ...] = ({}, {"encryption": "on", "key_ring": RING})


def readable(world: World) -> list[bytes]:
    """What is left in the store of anybody's answers."""
    page = world.store.responses.scan(limit=100)
    return [
        answer.record.payload.data for answer in page.answers if answer.record.payload and answer.record.payload.data
    ]


@pytest.mark.parametrize("mode", MODES, ids=("plain", "encrypted"))
def test_everything_of_this_tenant_is_wiped_and_nothing_runs_again(mode: dict[str, Any]) -> None:
    """Its retries are 410; nobody else notices anything."""
    world = shop(**mode)
    paid(world, "a"), paid(world, "b"), paid(world, "a", Tenant="globex")

    told = run(world, *PURGE)

    keys = len(mode) and 1
    assert (0, True) == (told.exit_code, told.output.startswith(f"Data keys destroyed: {keys}. Responses wiped: 2.\n"))
    assert 1 == len(readable(world))
    assert [410, 410] == [paid(world, key).status_code for key in "ab"]
    assert (201, 3) == (paid(world, "a", Tenant="globex").status_code, len(world.runs))


def test_it_says_what_it_does_not_reach() -> None:
    """What is not said here is believed to be gone."""
    told = run(shop(), *PURGE).output

    assert "all of them are wiped from the store, plain ones too" in told
    assert "Its records stay: until they expire, a retry gets 410" in told
    assert "Plain responses can be read in backups" in told
    assert "Secrets searched: 1." in told


def test_machines_get_numbers_and_repeating_it_is_harmless() -> None:
    world = shop()
    paid(world)

    told = [said(run(world, *PURGE, "--json")) for _ in range(2)]

    rest = {"data_keys": 0, "secrets": 1, "cache_unknown": False, "condemned": 0, "still_open": 0}
    assert [{**rest, "wiped": 1}, {**rest, "wiped": 0}] == told
    assert 410 == paid(world).status_code


def test_during_a_rotation_of_the_secret_it_is_wiped_under_every_one() -> None:
    world = shop(secret=["new", "old"])
    paid(world)

    assert 2 == said(run(world, *PURGE, "--json"))["wiped"]
    assert (410, []) == (paid(world).status_code, readable(world))


def test_what_is_still_running_is_counted_and_purged_when_it_is_over() -> None:
    """Its late answer is given to nobody, but can be read until then."""
    world = shop()
    vanished(world, "a"), lapsed(world, "b")
    assert "Uses of keys without a response so far: 2." in run(world, *PURGE).output

    def finish(_: Any = None) -> None:
        run(world, *PURGE)

    world.app.view_functions["pay"] = lambda: (finish(), "late")[1]  # type: ignore[func-returns-value]
    assert 200 == paid(world, "c").status_code
    assert 1 == len(readable(world))
    assert 410 == paid(world, "c").status_code

    assert 1 == said(run(world, *PURGE, "--json"))["wiped"]
    assert [] == readable(world)


def test_an_answer_that_nobody_could_open_is_wiped_too() -> None:
    """It was done, and stays done."""
    world = shop()
    paid(world)
    found = record(world)
    assert found is not None
    assert found.payload is not None
    world.store.mark_corrupt(key_of(world), found.payload)

    assert (1, 1) == ((told := said(run(world, *PURGE, "--json")))["wiped"], told["condemned"])
    after = record(world)
    assert after is not None
    assert after.payload is not None
    assert (State.COMPLETED, b"", ERASED) == (after.state, after.payload.data, after.payload.sealed_by)
    assert (410, 1) == (paid(world).status_code, len(world.runs))


def test_it_asks_first() -> None:
    world = shop()
    paid(world)

    assert [1, 1] == [run(world, *PURGE[:-1], typed=typed).exit_code for typed in ("n\n", "")]
    assert (201, 1) == (paid(world).status_code, len(readable(world)))
    assert 0 == run(world, *PURGE[:-1], typed="y\n").exit_code
    assert [] == readable(world)


def test_it_is_told_as_an_audit_event_and_names_nobody() -> None:
    world = shop()
    paid(world)
    run(world, *PURGE)
    pseudonym = Identity(b"s").pseudonym("acme")

    assert [
        TenantErased(
            "", "", tenant=pseudonym, actor="ops", reason="asked the bank", data_keys=0, wiped=1, finished=True
        )
    ] == world.told(TenantErased)


def test_a_run_that_breaks_off_is_told_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 2. Everything is decided by then: no answer is given any more."""
    world = shop()
    for number in range(3):
        paid(world, str(number))
    replace, left = type(world.store.responses).replace, [1]

    def failing(*arguments: Any) -> bool:
        if not left:
            raise StoreUnavailable("no answer")
        left.pop()
        return replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(world.store.responses), "replace", failing)
        told = run(world, *PURGE)

    (event,) = world.told(TenantErased)
    assert isinstance(event, TenantErased)
    assert (2, "Error: no answer\n", 1, False) == (told.exit_code, told.stderr, event.wiped, event.finished)
    assert 2 == len(readable(world))
    assert [410] * 3 == [paid(world, str(number)).status_code for number in range(3)]
    assert 2 == said(run(world, *PURGE, "--json"))["wiped"]


def test_a_store_that_cannot_be_searched_says_what_stays() -> None:
    """Its answers are wiped; what is not completed cannot be found."""

    class Unsearched(FaultyMemory):
        """It has answers and data keys, and no more."""

        def __init__(self) -> None:
            super().__init__(MemoryStore())
            del self.recovery

    world = shop(store=Unsearched())
    paid(world)
    told = run(world, *PURGE)

    assert (0, []) == (told.exit_code, readable(world))
    assert "cannot be searched for unfinished records" in told.output
    assert said(run(world, *PURGE, "--json"))["still_open"] is None


def test_a_store_whose_answers_cannot_be_walked_through_is_refused() -> None:
    """Before anything is destroyed."""

    class Unwalked(FaultyMemory):
        """It has data keys only."""

        def __init__(self) -> None:
            super().__init__(MemoryStore())
            del self.responses

    world = shop(store=Unwalked())
    paid(world)

    assert "See --shred" in refusal(run(world, *PURGE))
    assert 201 == paid(world).status_code
    poor = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]
    assert "keeps no data keys" in refusal(run(poor, *PURGE))


def test_it_wipes_what_is_in_a_database(tmp_path: Path) -> None:
    """Its rows hold nothing any more, and say that the work was done."""
    file = tmp_path / "records.db"
    world = new_world(store=f"sqlite:///{file}", tenant=lambda: request.headers.get("X-Tenant"))  # type: ignore[arg-type]
    world.view()(lambda: "a readable answer")
    assert 0 == run(world, "db", "upgrade").exit_code
    paid(world), paid(world, "b")

    told = said(run(world, *PURGE, "--json"))

    assert (2, 0) == (told["wiped"], told["condemned"])
    assert [410, 410] == [paid(world, key).status_code for key in ("k", "b")]
    answers = world.app.extensions["idempotency"].built.responses
    assert [b"", b""] == [answer.record.payload.data for answer in answers.scan(limit=9).answers]
