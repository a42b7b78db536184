"""Answers cached in Redis of tenants that were erased: none of them is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.replay_cache import REMEMBERED_MS, RedisReplayCache
from flask_idempotency.stores.tiered import Missed
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import a_key
from tests.stores.cached import PATIENT, completed, filled, missed


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


def test_what_was_cached_of_an_erased_tenant_is_not_replayed(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Nor is it there any more; and other tenants of the partition keep theirs."""
    key, record = filled(cache, completed(clock)), completed(clock)
    neighbour = StorageKey(rid=key.rid[::-1], tid=key.tid[:2] + bytes(14))
    cache.put(neighbour, record, missed_at=missed(cache, neighbour))

    assert cache.erase(key.tid)
    missed(cache, key)
    assert record == cache.get(neighbour)
    assert not redis_client.exists(layout.cached_response(key))


def test_what_is_on_its_way_when_a_tenant_is_erased_is_not_filled_in(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """The system has told it before. What it tells afterwards it knows to be good."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(1)
    cache.erase(key.tid)
    cache.put(key, record, missed_at=at)
    assert not redis_client.exists(layout.cached_response(key))
    missed(cache, key)
    clock.advance(1)
    cache.put(key, record, missed_at=missed(cache, key))

    assert record == cache.get(key)


def test_an_erasure_counts_for_entries_that_were_not_dropped(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A restored snapshot, or one that came in between."""
    key = filled(cache, completed(clock))
    entry = redis_client.dump(layout.cached_response(key))
    assert isinstance(entry, bytes)
    cache.erase(key.tid)
    redis_client.restore(layout.cached_response(key), 0, entry)

    missed(cache, key)
    clock.advance(1)
    cache.put(key, completed(clock, fence=1), missed_at=missed(cache, key))
    assert isinstance(cache.get(key), Record)


def test_a_clock_that_is_set_back_takes_back_no_erasure(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """A later one counts from the earlier one's time."""
    key = filled(cache, completed(clock))
    cache.erase(key.tid)
    clock.advance(-3600)
    cache.erase(key.tid)
    clock.advance(1800)
    cache.put(key, completed(clock), missed_at=int(clock.now * 1_000_000))

    missed(cache, key)


@pytest.mark.parametrize("text", ("nan", "", "later", "inf"))
def test_an_erasure_that_cannot_be_read_is_not_none(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock, text: str
) -> None:
    """The system of record is asked instead."""
    key = filled(cache, completed(clock))
    redis_client.set(layout.cache_erasure(key.tid), text)

    assert isinstance(cache.get(key), Missed)


def test_an_erasure_is_remembered_for_as_long_as_answers_are_kept(
    cache: RedisReplayCache, redis_client: redis.Redis
) -> None:
    """And not for ever."""
    tid = a_key().tid
    cache.erase(tid)

    assert 0 < redis_client.pttl(layout.cache_erasure(tid)) <= REMEMBERED_MS


def test_an_answer_that_the_system_says_is_erased_is_not_kept(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Told by the cache it would be no longer erased."""
    cache.put(a_key(), replace(completed(clock), erased=True), missed_at=int(clock.now * 1_000_000))

    assert redis_client.dbsize() == 0


def test_a_cache_that_does_not_answer_has_erased_nothing() -> None:
    """Whoever asked for it must hear so."""
    cache = RedisReplayCache("redis://127.0.0.1:1/0")

    assert not cache.erase(a_key().tid)
    assert not cache.erase(a_key().tid)
