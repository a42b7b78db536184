"""Lends the tests of this folder the stores in `tests/backends.py`, and a Redis store whose time stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from example_app.servers import RedisServer
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from tests.backends import clusters, make_kept, make_owned, make_reached, make_store, make_system
from tests.forgiving import redis_store
from tests.sql_backends import sql_databases, sql_stores

__all__ = [
    "clusters",
    "make_kept",
    "make_owned",
    "make_reached",
    "make_store",
    "make_system",
    "sql_databases",
    "sql_stores",
]


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def store(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisStore]:
    """Overridden by tests that reach it in a way of their own."""
    store = redis_store(redis_server.url, clock=clock)
    yield store
    store.close()
