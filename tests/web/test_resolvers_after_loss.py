"""Nobody is asked what became of a key while the store may have forgotten who is at it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.events import DataLossDetected
from flask_idempotency.engine.recovery import NeverHappened, UnknownOutcome
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.web.janitor import janitor_of
from tests.apps import World, new_world
from tests.stores.forgetting import Loss, emptying, handing_over, ready_store, refused

__all__ = ["emptying", "handing_over", "ready_store"]

DRAIN = Batcher(sleep=lambda seconds: None, monotonic=lambda: 0.0)


def unknown(store: Any, asked: list[UnknownOutcome]) -> World:
    """A payment that crashed, and a resolver that says that it never happened."""
    world = new_world(store=store, on_error="quarantine")

    @world.view(endpoint="pay")
    def pay() -> str:
        raise ZeroDivisionError

    @world.idempotency.resolver("pay")
    def never(outcome: UnknownOutcome) -> NeverHappened:
        asked.append(outcome)
        return NeverHappened()

    assert 500 == world.post().status_code
    return world


def reap(world: World, clock: FrozenClock) -> None:
    clock.advance(3600)
    janitor_of(world.app, host_clock=clock).run("reap", DRAIN)


@pytest.mark.parametrize("acknowledged", (False, True))
def test_a_resolver_is_asked_when_somebody_has_looked(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, acknowledged: bool
) -> None:
    """
    Until then another attempt may be at work that is in no record, and has not done yet what the resolver looks for.
    """
    asked: list[UnknownOutcome] = []
    world = unknown(store, asked)
    hand_over()
    refused(store)
    if acknowledged:
        store.data_loss.acknowledge(forced=True)
    for _ in range(2):
        reap(world, clock)

    assert acknowledged is bool(asked)


def test_a_janitor_that_is_the_first_to_notice_says_so_once(store: RedisStore, clock: FrozenClock, empty: Loss) -> None:
    """It looks more often than a new key comes."""
    world = unknown(store, [])
    empty()
    for _ in range(2):
        reap(world, clock)
    refused(store)

    assert [DataLossDetected("", "reap", loss="missing")] == world.told(DataLossDetected)


def test_a_resolver_is_asked_where_nobody_looks(redis_server: RedisServer, clock: FrozenClock) -> None:
    asked: list[UnknownOutcome] = []
    with closing(RedisStore(redis_server.url, clock=clock, rules=RedisDataLossPolicy(after_loss="run"))) as store:
        world = unknown(store, asked)
        for _ in range(2):
            reap(world, clock)

    assert asked
