"""What runs while the keys cannot be had, or the store, or neither: `on_store_down="allow"` speaks of the store alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from flask import Flask

from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import StoreFailed
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.web.apps import FaultyMemory, World, is_replay, new_world

UNAVAILABLE = (503, "store-unavailable", "2", None)


class Service:
    """A key service that may be away, or not even say what its newest key is."""

    def __init__(self) -> None:
        self._ring = KeyRing({"a": b"a" * 32})
        self.error: Exception | None = None
        self.mute = False

    @property
    def newest(self) -> str:
        if self.mute:
            raise TimeoutError
        return "a"

    def kids(self) -> Sequence[str]:
        return ["a"]

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        self._answer()
        return self._ring.wrap(kid, key, context=context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        self._answer()
        return self._ring.unwrap(kid, wrapped, context=context)

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


class _Cut:
    """What a store keeps besides, behind the same line."""

    def __init__(self, store: FaultyMemory) -> None:
        self._store, self._keys = store, store.data_keys
        self.locked = False
        """Whether they alone are not to be had."""

    def __getattr__(self, name: str) -> Any:
        if self._store.down or self.locked:
            raise StoreUnavailable("the line is cut, as this test asked")
        return getattr(self._keys, name)


class CutOff(FaultyMemory):
    """Also its data keys are not to be had while it is down."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=FrozenClock()))
        self.data_keys = _Cut(self)  # type: ignore[assignment]


def process(service: Service, store: FaultyMemory | None = None, *, encryption: str = "on") -> World:
    """One of several processes. Each remembers the data keys that it has asked for, and no other's."""
    world = new_world(
        Flask("tests.web.app"),
        store=store or CutOff(),
        encryption=encryption,
        key_ring=service,
        allow_plaintext_transport=True,
        on_store_down="allow",
    )

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid", 201

    return world


def told(world: World, key: str) -> tuple[int, str, str | None, str | None]:
    answer = world.post(key=key)
    status = answer.headers.get("Idempotency-Status")
    code = answer.get_json()["code"] if answer.is_json else answer.text
    return answer.status_code, code, answer.headers.get("Retry-After"), status


def test_what_is_known_answers_while_the_data_keys_cannot_be_read() -> None:
    """A node that is down, a table that is locked, a store that is full: the records are there, and say who has run."""
    service = Service()
    plain = new_world(Flask("tests.web.app"), store=CutOff())
    plain.view()(lambda: ("paid", 201))
    plain.post(key="plain")
    before = process(service, plain.store)
    before.post(key="sealed")
    world = process(service, plain.store)
    plain.store.data_keys.locked = True  # type: ignore[attr-defined]

    assert [(201, "paid", None, None), UNAVAILABLE, UNAVAILABLE] == [told(world, k) for k in ("plain", "sealed", "new")]
    assert 422 == world.post(key="sealed", data="another").status_code
    assert [] == world.runs


@pytest.mark.parametrize("encryption", ("on", "required"))
@pytest.mark.parametrize("error", (TimeoutError(), StoreUnavailable("its own word for it")), ids=("raises", "says so"))
def test_nothing_runs_while_only_the_keys_are_away(error: Exception, encryption: str) -> None:
    """The store is up, so it knows who has run: a request that goes past it would be run again by the next."""
    service = Service()
    before = process(service, encryption=encryption)
    before.post(key="known")
    service.error = error
    world = process(service, before.store, encryption=encryption)

    answers = [told(world, key) for key in ("known", "new", "new")]

    assert [UNAVAILABLE] * 3 == answers
    assert [] == world.runs
    assert [False] * 3 == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]
    service.error = None
    assert (True, 201, [1]) == (is_replay(world.post(key="known")), world.post(key="new").status_code, world.runs)


def test_nor_while_the_service_does_not_even_say_which_key_is_the_newest() -> None:
    service = Service()
    world = process(service)
    world.post(key="known")
    service.mute = True

    # What is known is opened with a key that is remembered, and needs no newest one.
    assert [(201, "paid", None, None), UNAVAILABLE] == [told(world, key) for key in ("known", "new")]
    assert [1] == world.runs


def test_the_log_says_that_it_is_the_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads it at night looks for the right server."""
    service = Service()
    service.error = TimeoutError("canary")

    with caplog.at_level(logging.WARNING):
        told(process(service), "k")

    (message,) = [message for message in caplog.messages if "503" in message]
    assert "the key provider is not available (TimeoutError)" in message
    assert "canary" not in caplog.text


@pytest.mark.parametrize("keys", ("remembered", "never asked for", "away as well"))
def test_without_the_store_it_runs_unprotected_whatever_is_known_of_the_keys(keys: str) -> None:
    """That is what was asked for: it is the store that does not answer, also where it is asked for a data key first."""
    service = Service()
    world = process(service)
    if keys == "remembered":
        world.post(key="before")
    if keys == "away as well":
        service.error = TimeoutError()
    world.store.down = True

    answer = told(world, "k")

    assert (201, "paid", None, "unprotected") == answer
    assert [True] == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]
