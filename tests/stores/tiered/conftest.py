"""A cache of responses on a running Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.testing import FrozenClock
from tests.stores.cached import PATIENT


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()
