"""Owners restore claims that Redis lost; finished or freed keys stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.model import Grant, InFlight, Record, Unknown
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.stores.forgetting import Loss, claim, emptying, handing_over, losing, ready_store, refused

__all__ = ["emptying", "handing_over", "losing", "ready_store"]


class Owner:
    """Somebody whose claim was granted a while ago."""

    def __init__(self, store: RedisStore, clock: FrozenClock, **asked: Any) -> None:
        self._store, self._clock, self._began = store, clock, clock.now
        self.request = replace(a_request(a_key()), **asked)
        self.grant = self._granted()
        self.key, self.token = self.request.key, self.grant.token

    def _granted(self) -> Grant:
        return granted(self._store.claim(self.request, token=a_token(), lease=LEASE, quota=Quota(records=9)))

    def restore(self) -> bool:
        age = self._clock.now - self._began
        return self._store.data_loss.restore_claim(self.request, self.grant, lease=LEASE, age=age)


def test_an_owner_restores_its_claim(store: RedisStore, clock: FrozenClock, lose: Loss, redis_client: Any) -> None:
    owner = Owner(store, clock)
    lose()
    redis_client.delete(layout.keys(owner.key)[0])
    with pytest.raises(LeaseLost):
        store.renew(owner.key, owner.token, lease=LEASE)

    assert [True, True] == [owner.restore() for _ in range(2)]
    record = found(store, owner.key)
    assert (owner.token, owner.grant.fence, owner.request.info) == (record.token, record.fence, record.info)
    assert isinstance(claim(store, owner.key), InFlight)
    assert isinstance(claim(store, owner.key, token=owner.token), Grant)
    assert 1 == redis_client.zcard(layout.indexes_in(layout.number(owner.key.tid))[0])
    store.complete(owner.key, owner.token, PAYLOAD, keep=KEEP)
    assert isinstance(claim(store, owner.key), Record)


def test_fences_rise_after_a_restored_claim(store: RedisStore, clock: FrozenClock, empty: Loss) -> None:
    owner = Owner(store, clock)
    empty()
    owner.restore()
    clock.advance(-3600)
    store.data_loss.acknowledge(forced=True)
    store.release(owner.key, owner.token)

    assert granted(claim(store, owner.key)).fence > owner.grant.fence


def test_an_owner_may_detect_the_loss_first(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, redis_client: Any
) -> None:
    owner = Owner(store, clock)
    hand_over()
    redis_client.delete(layout.keys(owner.key)[0])

    assert owner.restore()
    assert {"changed": layout.PARTITIONS} == store.data_loss.status().losses


def test_no_claim_is_restored_without_a_loss(store: RedisStore, clock: FrozenClock) -> None:
    owner = Owner(store, clock)
    store.release(owner.key, owner.token)

    assert not owner.restore()
    assert store.read(owner.key) is None


def test_an_owner_restores_its_claim_after_a_clock_change(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, redis_client: redis.Redis
) -> None:
    """The loss was noticed by a clock that was behind; then it was set forward."""
    owner = Owner(store, clock)
    clock.advance(-600)
    hand_over()
    redis_client.delete(layout.keys(owner.key)[0])
    refused(store)
    clock.advance(1200)

    assert owner.restore()


def test_a_removed_record_is_not_restored(store: RedisStore, clock: FrozenClock, redis_client: redis.Redis) -> None:
    owner = Owner(store, clock)
    redis_client.delete(layout.keys(owner.key)[0])

    assert not owner.restore()


def test_a_claim_that_its_owner_releases_is_not_restored(store: RedisStore, clock: FrozenClock, empty: Loss) -> None:
    """The thread that renews may find its claim forgotten just before the view's thread releases it."""
    owner = Owner(store, clock)
    empty()
    store.release(owner.key, owner.token)

    assert not owner.restore()


def test_a_force_released_claim_is_not_restored_again(store: RedisStore, clock: FrozenClock, empty: Loss) -> None:
    owner = Owner(store, clock)
    empty()
    assert owner.restore()
    clock.advance(LEASE + 1)
    assert isinstance(claim(store, owner.key), Unknown)
    assert store.recovery.force_release(SeenRecord(owner.key, found(store, owner.key)))

    assert not owner.restore()


def test_a_key_claimed_since_the_loss_is_not_restored(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    hand_over()
    refused(store)
    store.data_loss.acknowledge(forced=True)
    clock.advance(1)
    owner = Owner(store, clock)
    clock.advance(1)
    store.release(owner.key, owner.token)

    assert not owner.restore()


def test_a_restored_claim_overwrites_no_other_record(store: RedisStore, clock: FrozenClock, empty: Loss) -> None:
    owner = Owner(store, clock)
    empty()
    store.data_loss.acknowledge(forced=True)
    other = granted(claim(store, owner.key))

    assert not owner.restore()
    assert other.token == found(store, owner.key).token
