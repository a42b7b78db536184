"""Unsettled records, as a test finds them on a Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import redis

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, found, granted


def in_partition(partition: int) -> StorageKey:
    return a_key(tid=partition.to_bytes(2, "big") + a_token()[2:])


def sheets(page: Callable[[bytes], RecordPage]) -> Iterator[RecordPage]:
    after: bytes | None = b""
    while after is not None:
        sheet = page(after)
        yield sheet
        after = sheet.after


def stale(store: RedisStore, *, limit: int = 1000, horizon: float = 1e10) -> list[RecordPage]:
    return list(sheets(lambda after: store.recovery.expired_leases(horizon=horizon, after=after, limit=limit)))


def keys(met: list[RecordPage]) -> list[StorageKey]:
    return [each.key for sheet in met for each in sheet.found]


def seen(store: RedisStore, key: StorageKey) -> SeenRecord:
    return SeenRecord(key, found(store, key))


def indexed(client: redis.Redis, key: StorageKey) -> list[bool]:
    """Whether it is in flight, and in quarantine, by the indexes."""
    names = layout.keys(key)
    return [client.zscore(index, layout.name(names)) is not None for index in names[1:3]]


def walked(store: RedisStore, state: State) -> list[StorageKey]:
    return keys(list(sheets(lambda after: store.recovery.scan(state, after=after, limit=10))))


def lapsed(store: RedisStore, clock: FrozenClock, *keys: StorageKey, **how: Any) -> None:
    for key in keys:
        granted(store.claim(a_request(key, **how), token=a_token(), lease=LEASE))
    clock.advance(LEASE)
