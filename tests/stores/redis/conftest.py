"""A Redis that a test fills, and one whose packets it loses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import TcpProxy


@pytest.fixture
def full(store: RedisStore, redis_client: redis.Redis) -> Iterator[tuple[RedisStore, redis.Redis]]:
    """A store, and a client that sets `maxmemory`."""
    yield store, redis_client
    redis_client.config_set("maxmemory", 0)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy
