"""A Redis that is full when it loses its memory: nothing runs that was refused, and owners and operators are not kept out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreDataLoss
from flask_idempotency.engine.model import Claimed, OnExpiry, Replayed, Unknown
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted, stand
from tests.stores.forgetting import RULES, Loss, claim, handing_over, ready_store, refused

__all__ = ["handing_over", "ready_store"]


@pytest.fixture
def fill(redis_client: Any) -> Iterator[Any]:
    yield lambda: redis_client.config_set("maxmemory", 1)
    redis_client.config_set("maxmemory", 0)


def test_a_key_that_is_not_known_is_refused_as_such(store: RedisStore, hand_over: Loss, fill: Any) -> None:
    """Not as by a store that is away, which some let requests run past; and it is noticed again when there is room."""
    hand_over()
    fill()

    assert ["changed"] * 2 == [refused(store).loss for _ in range(2)]


def test_a_key_that_is_known_is_answered(store: RedisStore, clock: FrozenClock, hand_over: Loss, fill: Any) -> None:
    lapsed, done = a_key(), a_key()
    stand(store, clock, done, "completed")
    stand(store, clock, lapsed, "lapsed, quarantine")
    hand_over()
    fill()

    assert [Unknown, Replayed] == [type(claim(store, key)) for key in (lapsed, done)]


def test_owners_put_back_and_complete(store: RedisStore, clock: FrozenClock, redis_client: Any, fill: Any) -> None:
    request, token = a_request(a_key()), a_token()
    grant = granted(store.claim(request, token=token, lease=LEASE))
    redis_client.flushall()
    clock.advance(1)
    fill()

    assert store.data_loss.restore_claim(request, grant, lease=LEASE, age=1.0)
    store.complete(request.key, token, PAYLOAD, keep=KEEP)
    assert isinstance(claim(store, request.key), Replayed)


def test_an_operator_looks_and_acknowledges(
    store: RedisStore, redis_server: RedisServer, redis_client: Any, hand_over: Loss, fill: Any
) -> None:
    hand_over()
    fill()
    assert {"changed": layout.PARTITIONS} == store.data_loss.status().losses
    store.data_loss.acknowledge(forced=True)
    redis_client.config_set("maxmemory", 0)

    assert isinstance(claim(store), Claimed)


def test_a_claim_that_may_be_taken_over_is_not(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, fill: Any
) -> None:
    key = a_key()
    granted(claim(store, key, on_expiry=OnExpiry.TAKEOVER))
    clock.advance(LEASE + 1)
    hand_over()
    fill()

    assert isinstance(claim(store, key), Unknown)


def test_what_an_emptied_store_is_given_back_from_before_is_not_taken_over(
    store: RedisStore, clock: FrozenClock, redis_server: RedisServer, redis_client: Any
) -> None:
    """A copy from before it was made ready holds claims, and says nothing of itself."""
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    kept = redis_client.dump(layout.keys(key)[0])
    redis_client.flushall()
    redis_client.restore(layout.keys(key)[0], 0, kept)
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as another, pytest.raises(StoreDataLoss):
        claim(another, key)
    store.data_loss.acknowledge(forced=True)

    assert isinstance(claim(store, key), Unknown)
