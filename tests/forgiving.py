"""Redis stores for tests about something else than what a Redis forgets."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any, Final

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.store import Clock, store_time
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore

FORGIVING: Final = RedisDataLossPolicy(after_loss="run")


def redis_store(server: Any, *, clock: Clock = store_time) -> RedisStore:
    """One that is ready at once, whether or not somebody has made it so."""
    return RedisStore(server, clock=clock, rules=FORGIVING)


def make_ready(url: str) -> None:
    """What whoever sets up a new Redis does once: harmless for one that is ready or away, and for what is no Redis."""
    if url.startswith(("redis", "unix")):
        with closing(RedisStore(url)) as store, suppress(StoreUnavailable):
            store.data_loss.initialise()


def look_at(url: str) -> None:
    """What an operator does after a Redis was away, who knows that it has lost nothing."""
    with closing(RedisStore(url)) as store:
        store.data_loss.acknowledge(forced=True)
