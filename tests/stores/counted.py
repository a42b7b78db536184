"""Keys of one tenant that are counted, and what a Redis then holds."""

from __future__ import annotations

from typing import Any

import redis

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import StoredPayload
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted

PLENTY = Quota(10**6, 10**15, 10**6, NewKeys(10**6, 60))
SHUT = (Quota(records=0), Quota(bytes=0), Quota(in_flight=0), Quota(new_keys=NewKeys(0, 60)))


def claim(store: RedisStore, tid: bytes, quota: Quota = PLENTY, **how: Any) -> tuple[StorageKey, bytes]:
    key, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(key, **how), token=token, lease=LEASE, quota=quota))
    return key, token


def complete(store: RedisStore, tid: bytes, *, keep: float = KEEP, payload: StoredPayload = PAYLOAD) -> StorageKey:
    key, token = claim(store, tid)
    store.complete(key, token, payload, keep=keep)
    return key


def everything(client: redis.Redis) -> dict[bytes, object]:
    return {name: client.dump(name) for name in client.scan_iter()}


def fields(client: redis.Redis, tid: bytes, prefix: bytes) -> dict[bytes, bytes]:
    """Of this tenant's ledger: those that begin so."""
    told: dict[Any, Any] = client.hgetall(layout.tenant_quota(tid))
    return {field: text for field, text in told.items() if field[:1] == prefix}
