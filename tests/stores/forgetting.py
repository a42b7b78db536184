"""A Redis store that was made ready, and two ways in which it loses its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreDataLoss
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token

SKEW, HOLD = 5.0, 60.0
RULES = RedisDataLossPolicy(grace=HOLD, clock_skew=SKEW)
ANOTHER = {b"process": b"0" * 40, b"replication_id": b"0" * 40}
"""Of a process that is not the one that keeps the memory."""

Loss = Callable[[], None]


@pytest.fixture(name="store")
def ready_store(redis_server: RedisServer, clock: FrozenClock, few_partitions: None) -> Iterator[RedisStore]:
    """Made ready in time: no claim is as old as that."""
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as store:
        store.data_loss.initialise()
        clock.advance(1)
        yield store


@pytest.fixture(name="hand_over")
def handing_over(redis_client: redis.Redis, clock: FrozenClock) -> Loss:
    """As if another process had kept all this."""

    def hand_over() -> None:
        with redis_client.pipeline(transaction=False) as pipeline:
            for partition in range(layout.PARTITIONS):
                pipeline.hset(layout.facts_in(partition), mapping=ANOTHER)  # type: ignore[arg-type]
            pipeline.execute()
        clock.advance(1)

    return hand_over


@pytest.fixture(name="empty")
def emptying(redis_client: redis.Redis, clock: FrozenClock) -> Loss:
    def empty() -> None:
        redis_client.flushall()
        clock.advance(1)

    return empty


@pytest.fixture(name="lose", params=["another process", "emptied"])
def losing(request: pytest.FixtureRequest, hand_over: Loss, empty: Loss) -> Loss:
    return hand_over if request.param == "another process" else empty


def claim(store: RedisStore, key: StorageKey | None = None, *, token: bytes | None = None, **asked: Any) -> Any:
    request = replace(a_request(key or a_key()), **asked)
    return store.claim(request, token=token or a_token(), lease=LEASE)


def refused(store: RedisStore, key: StorageKey | None = None, **asked: Any) -> StoreDataLoss:
    with pytest.raises(StoreDataLoss) as raised:
        claim(store, key, **asked)
    return raised.value
