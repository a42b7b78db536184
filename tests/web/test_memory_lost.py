"""What clients are told by a store that has forgotten what it promised."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.errors import StoreDataLoss
from flask_idempotency.engine.events import RefusedAfterDataLoss, StoreFailed
from flask_idempotency.engine.model import ClaimRequest
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.web.apps import World, new_world


class Forgetful(MemoryStore):
    """Knows no key, and says that it should."""

    def __init__(self) -> None:
        super().__init__(clock=FrozenClock())
        self.asked: list[ClaimRequest] = []

    def claim(self, request: ClaimRequest, **terms: Any) -> Any:
        self.asked.append(request)
        raise StoreDataLoss("it was emptied", loss="missing")


def a_world(**policy: Any) -> World:
    world = new_world(store=Forgetful(), **policy)  # type: ignore[arg-type]

    @world.view(endpoint="pay")
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    return world


@pytest.mark.parametrize("on_store_down", ("refuse", "allow"))
def test_a_request_is_refused_and_never_run(on_store_down: str) -> None:
    """Also where requests run while the store is away: it is there, and what ran past it would be run again."""
    world = a_world(on_store_down=on_store_down)
    answer = world.post()

    assert (503, "memory-lost", "30") == (
        answer.status_code,
        (answer.json or {})["code"],
        answer.headers["Retry-After"],
    )
    assert [] == world.runs
    assert (["missing"], []) == ([each.loss for each in world.told(RefusedAfterDataLoss)], world.told(StoreFailed))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "born"),
    (
        ("01955eb2-0400-7abc-8def-0123456789ab", 0x01955EB20400 / 1000),
        ("01955EB2-0400-7ABC-BDEF-0123456789AB", 0x01955EB20400 / 1000),
        ("01955eb2-0400-4abc-8def-0123456789ab", None),
        ("01955eb2-0400-7abc-cdef-0123456789ab", None),
        ("01955eb204007abc8def0123456789ab", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1469922850.259),
        ("01arz3ndektsv4rrffq69g5fav", 1469922850.259),
        ("81ARZ3NDEKTSV4RRFFQ69G5FAV", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAU", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAVX", None),
        ("order-17", None),
    ),
)
def test_the_store_is_told_when_a_key_was_made(key: str, born: float | None) -> None:
    """Of UUIDs of version 7 and of ULIDs alone: of others nobody knows."""
    world = a_world()
    world.post(key=key)

    assert [born] == [request.key_timestamp for request in world.store.asked]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("in_flight", "awaited"), (("wait", True), ("reject", False)))
def test_the_store_is_told_whether_duplicates_wait(in_flight: str, awaited: bool) -> None:
    world = a_world(in_flight=in_flight)
    world.post()

    assert [awaited] == [request.notify_on_completion for request in world.store.asked]  # type: ignore[attr-defined]
