"""What an owner may do to its record, by name."""

from __future__ import annotations

from collections.abc import Callable

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD

Call = Callable[[RedisStore, StorageKey, bytes], object]

WRITES: dict[str, Call] = {
    "renew": lambda store, key, token: store.renew(key, token, lease=2 * LEASE),
    "mark_point_of_no_return": lambda store, key, token: store.mark_point_of_no_return(key, token),
    "complete": lambda store, key, token: store.complete(key, token, PAYLOAD, keep=KEEP),
    "release": lambda store, key, token: store.release(key, token),
    "quarantine": lambda store, key, token: store.quarantine(key, token, "lost"),
}
