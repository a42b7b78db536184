"""Answers cached in Redis: how long, instead of which others, and in how many commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import Record, RequestInfo, State
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.client import CACHE_SECONDS, make_cache_client
from flask_idempotency.stores.redis.encoding import ABOUT_TEXT_BYTES
from flask_idempotency.stores.redis.replay_cache import LARGEST_BYTES, RedisReplayCache
from flask_idempotency.stores.tiered import Missed
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import KEEP, PAYLOAD, a_key
from tests.stores.cached import PATIENT, completed, filled, missed


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


def test_what_is_filled_in_is_found(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """The whole record, and how long it has to live."""
    record = completed(clock)
    key = filled(cache, record)
    clock.advance(100)

    assert replace(record, remaining=KEEP - 100) == cache.get(key)


def test_a_miss_tells_the_caches_time(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Nobody else's clock can say when an answer has to go from here."""
    assert cache.get(a_key()) == Missed(at=int(clock.now * 1_000_000))


def test_without_a_clock_the_servers_time_is_told(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    """As in production; and what is filled in by it is found."""
    cache, key = RedisReplayCache(redis_server.url + PATIENT), a_key()
    try:
        before = redis_client.time()
        at = missed(cache, key)
        after = redis_client.time()
        cache.put(key, completed(FrozenClock()), missed_at=at)
        found = cache.get(key)
    finally:
        cache.close()

    assert before[0] * 1_000_000 + before[1] <= at <= after[0] * 1_000_000 + after[1]
    assert isinstance(found, Record)
    assert KEEP - 60 < found.remaining < KEEP


def test_the_clock_decides_and_not_the_keys_existence(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Redis is late with throwing keys away, and a frozen one does not do it at all."""
    key = filled(cache, completed(clock))
    clock.advance(KEEP - 0.125)
    assert isinstance(cache.get(key), Record)
    clock.advance(0.125)

    missed(cache, key)
    assert redis_client.exists(layout.cached_response(key))


def test_redis_throws_it_away_by_itself(cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """A cache that nobody sweeps must not grow for ever."""
    key = filled(cache, completed(clock))

    assert (KEEP - 60) * 1000 < redis_client.pttl(layout.cached_response(key)) <= KEEP * 1000


def test_no_key_says_whose_it_is(cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """Its place is in the layout, beside the place that a record would have if this Redis were the store."""
    key = filled(cache, completed(clock))

    assert redis_client.keys() == [layout.cached_response(key)]
    assert re.fullmatch(rb"idm1:\{p[0-9a-f]{4}\}:c:[A-Za-z0-9_-]{43}", layout.cached_response(key))
    assert layout.cached_response(key) == layout.keys(key)[0].replace(b":r:", b":c:")


def test_what_arrives_late_has_lived_for_as_long(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """The system said how long before the fill set out. On its way it was held up; the record's end did not move."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(KEEP / 2)
    cache.put(key, record, missed_at=at)

    assert replace(record, remaining=KEEP / 2) == cache.get(key)


def test_what_arrives_after_its_end_is_not_filled_in(
    cache: RedisReplayCache, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """By then the key may be in use again. Nothing is wrong with that, and nothing is said."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(KEEP)
    cache.put(key, record, missed_at=at)

    missed(cache, key)
    assert caplog.records == []


def test_a_clock_that_is_set_back_does_not_lengthen_a_life_that_begins(
    cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """Between the miss and the fill, as when a replica with another clock takes over."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(-86400)
    cache.put(key, record, missed_at=at)

    assert record == cache.get(key)


def test_a_later_claims_answer_stays(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Fences tell which is later, whichever arrives last."""
    late, early = completed(clock, fence=2**41), completed(clock, fence=2**41 - 1)
    key = filled(cache, late)
    cache.put(key, early, missed_at=int(clock.now * 1_000_000))

    assert late == cache.get(key)


@pytest.mark.parametrize("fence", (2**41, 2**41 + 1))
def test_an_earlier_claims_answer_is_replaced(cache: RedisReplayCache, clock: FrozenClock, fence: int) -> None:
    """And the same claim's, which is the same answer."""
    key, record = filled(cache, completed(clock, fence=2**41)), completed(clock, fence=fence)
    cache.put(key, record, missed_at=int(clock.now * 1_000_000))

    assert record == cache.get(key)


def test_a_later_answer_that_has_ended_stands_in_nobodys_way(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Its fence counts for as long as it lives."""
    key = filled(cache, completed(clock, fence=9))
    clock.advance(KEEP)
    record = completed(clock, fence=8)
    cache.put(key, record, missed_at=missed(cache, key))

    assert record == cache.get(key)


def test_only_what_is_completed_is_cached(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A record in flight that was replayed from a cache would be in flight for ever."""
    at = int(clock.now * 1_000_000)
    for state in (State.PROCESSING, State.QUARANTINED):
        cache.put(a_key(), replace(completed(clock), state=state, payload=None), missed_at=at)

    assert redis_client.dbsize() == 0


def test_what_does_not_fit_is_left_to_the_system(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A cached record equals the system's, or there is none."""
    at = int(clock.now * 1_000_000)
    for record in (
        completed(clock, about=RequestInfo(principal="p" * (ABOUT_TEXT_BYTES + 1))),
        completed(clock, payload=replace(PAYLOAD, data=bytes(LARGEST_BYTES))),
        replace(completed(clock), attempt=256),
        replace(completed(clock), remaining=0.0),
    ):
        cache.put(a_key(), record, missed_at=at)

    assert redis_client.dbsize() == 0


def test_looking_and_filling_are_one_command_each(redis_server: RedisServer, clock: FrozenClock) -> None:
    """Counted where they pass."""
    with TcpProxy(redis_server.port) as proxy:
        cache, key = RedisReplayCache(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}", clock=clock), a_key()
        filled(cache, completed(clock))
        before = proxy.requests, proxy.chunks
        cache.put(key, completed(clock), missed_at=missed(cache, key))
        cache.get(key)
        cache.close()

        assert (proxy.requests - before[0], proxy.chunks - before[1]) == (3, 3)


def test_a_client_of_the_applications_own_will_do(
    redis_client: redis.Redis, redis_server: RedisServer, clock: FrozenClock
) -> None:
    """Also one that takes everything for text; and it is not closed."""
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        cache = RedisReplayCache(client, clock=clock)
        filled(cache, completed(clock))
        held: Any = client.connection_pool.get_connection()
        cache.close()

        assert held.is_connected
        client.connection_pool.release(held)


def test_a_cache_waits_briefly_and_asks_once() -> None:
    """It is there to save time."""
    with make_cache_client("redis://127.0.0.1:1/0") as client:
        options = client.connection_pool.connection_kwargs

    assert (options["socket_connect_timeout"], options["socket_timeout"]) == (CACHE_SECONDS, CACHE_SECONDS)
    assert options["retry"].get_retries() == 0
    assert CACHE_SECONDS <= 0.05


def test_the_url_may_give_it_more_time() -> None:
    """For one that is far away."""
    with make_cache_client("redis://127.0.0.1:1/0?socket_timeout=0.5") as client:
        assert client.connection_pool.connection_kwargs["socket_timeout"] == 0.5


def test_a_url_that_names_no_server_is_refused() -> None:
    """Under the name of the setting that it comes from, and without its password."""
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_REDIS_URL") as raised:
        RedisReplayCache("redis://:p4ss/w0rd@host")

    assert "p4ss" not in str(raised.value)
