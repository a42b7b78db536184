"""An inbox on Redis: what it says after a data loss, and a message that no store call may crash on."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.consumers import Later, Processed
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from tests.apps import World, new_world
from tests.consumers.test_inbox import process
from tests.stores.forgetting import Loss, emptying, handing_over, losing, ready_store

__all__ = ["emptying", "handing_over", "losing", "ready_store"]


@pytest.fixture
def world(store: RedisStore) -> World:
    anything: Any = store
    return new_world(store=anything)


def uuid7(seconds: float) -> str:
    """Return a UUID version 7 that was made at this time."""
    milliseconds = f"{int(seconds * 1000):012x}"
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7000-8000-000000000000"


def test_an_inbox_replays_from_redis(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    verdicts = [process(world, inbox, value={"id": 7}) for _ in range(2)]

    assert [Processed({"id": 7}, replayed=False), Processed({"id": 7}, replayed=True)] == verdicts


def test_an_unknown_message_waits_after_a_data_loss(world: World, lose: Loss) -> None:
    inbox = world.idempotency.inbox("billing")
    process(world, inbox)
    lose()

    assert Later(30.0, "memory-lost") == process(world, inbox, "m-2")
    assert ["m-1"] == world.runs


def test_a_message_that_was_made_after_the_loss_runs(world: World, clock: FrozenClock, hand_over: Loss) -> None:
    """Its sender says so, or its id. An emptied Redis does not know when that was."""
    inbox = world.idempotency.inbox("billing")
    process(world, inbox)
    hand_over()
    assert Later(30.0, "memory-lost") == process(world, inbox, "m-2", born=clock.now - 60.0)
    clock.advance(60.0)
    verdicts = [process(world, inbox, "m-2", born=clock.now), process(world, inbox, uuid7(clock.now))]

    assert [Processed("done", replayed=False)] * 2 == verdicts


def test_the_time_of_the_sender_overrules_that_of_the_id(world: World, clock: FrozenClock, hand_over: Loss) -> None:
    inbox = world.idempotency.inbox("billing")
    process(world, inbox)
    hand_over()
    clock.advance(60.0)

    assert Later(30.0, "memory-lost") == process(world, inbox, uuid7(clock.now), born=clock.now - 600.0)
