"""Answers to cache, and a look at whether they are."""

from __future__ import annotations

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, RequestInfo, State, StoredPayload
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import Missed
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import ABOUT, FINGERPRINT, KEEP, PAYLOAD, a_key, a_token

# More time than a cache gets otherwise: two busy cores would sometimes need it.
PATIENT = "?socket_timeout=5&socket_connect_timeout=5"


def completed(
    clock: FrozenClock, *, fence: int = 7, payload: StoredPayload = PAYLOAD, about: RequestInfo = ABOUT
) -> Record:
    """A record as a system of record has just told it, whose clock happens to be the cache's."""
    return Record(
        state=State.COMPLETED,
        token=a_token(),
        fence=fence,
        attempt=1,
        fingerprint=FINGERPRINT,
        on_expiry=OnExpiry.QUARANTINE,
        info=about,
        requested_at=clock.now - 10,
        deadline=clock.now + KEEP,
        remaining=KEEP,
        completed_at=clock.now - 1,
        payload=payload,
    )


def missed(cache: RedisReplayCache, key: StorageKey) -> int:
    """When this key was looked for in vain, by the cache's clock."""
    match cache.get(key):
        case Missed(at=int(at)):
            return at
        case found:
            raise AssertionError(found)


def filled(cache: RedisReplayCache, record: Record) -> StorageKey:
    key = a_key()
    cache.put(key, record, missed_at=missed(cache, key))
    assert record == cache.get(key)
    return key
