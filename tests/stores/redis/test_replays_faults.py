"""A cache that is spoilt, full, forgetful or gone: it has no answer then, and raises nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import Missed
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import PAYLOAD, a_key
from tests.lab.redis import StartRedis
from tests.stores.cached import PATIENT, completed, filled, missed


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


def sealed(client: redis.Redis, key: StorageKey) -> bytes:
    data = client.get(layout.cached_response(key))
    assert isinstance(data, bytes)
    return data


@pytest.mark.parametrize("spoilt", ("a bit", "cut short", "the sum alone", "another key's", "of another type"))
def test_what_cannot_be_read_is_dropped(
    cache: RedisReplayCache,
    redis_client: redis.Redis,
    clock: FrozenClock,
    caplog: pytest.LogCaptureFixture,
    spoilt: str,
) -> None:
    """In a cache it is as good as absent, because the system of record still decides. It is logged, without the key."""
    key, other = filled(cache, completed(clock)), filled(cache, completed(clock))
    data = sealed(redis_client, key)
    match spoilt:
        case "a bit":
            redis_client.set(layout.cached_response(key), data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "cut short":
            redis_client.set(layout.cached_response(key), data[:-5])
        case "the sum alone":
            redis_client.set(layout.cached_response(key), data[:18])
        case "another key's":
            redis_client.set(layout.cached_response(key), sealed(redis_client, other))
        case _:
            redis_client.delete(layout.cached_response(key))
            redis_client.lpush(layout.cached_response(key), "not ours")

    assert isinstance(cache.get(key), Missed)

    assert not redis_client.exists(layout.cached_response(key))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert layout.cached_response(key).decode() not in caplog.text
    missed(cache, key)


@pytest.mark.parametrize("which", ("entry", "erasure"))
def test_of_what_is_ours_nothing_is_dropped_beside_what_is_not(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock, which: str
) -> None:
    """What keeps late answers out goes on doing so."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(1)
    if which == "entry":
        cache.erase(key.tid)
        redis_client.lpush(layout.cached_response(key), "not ours")
    else:
        cache.invalidate(key, fence=record.fence)
        redis_client.lpush(layout.cache_erasure(key.tid), "not ours")
    assert isinstance(cache.get(key), Missed)
    cache.put(key, record, missed_at=at)

    missed(cache, key)


def test_an_answer_that_is_withdrawn_late_lets_nothing_in_that_was_withdrawn_since(
    cache: RedisReplayCache, clock: FrozenClock
) -> None:
    """The first one was stuck on its way, and its key was used again."""
    key = a_key()
    at = missed(cache, key)
    for fence in (8, 7):
        assert cache.invalidate(key, fence=fence)
    cache.put(key, completed(clock, fence=8), missed_at=at)
    missed(cache, key)
    cache.put(key, completed(clock, fence=9), missed_at=at)

    assert isinstance(cache.get(key), Record)


def test_a_server_that_forgot_the_scripts_is_told_again(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Restarted, it knows neither scripts nor answers."""
    filled(cache, completed(clock))
    redis_client.flushall()
    redis_client.script_flush()

    filled(cache, completed(clock))


def test_a_full_one_still_replays(
    start_redis: StartRedis, redis_kind: str, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes no more answers, which is said once until it does, and nobody leaves it alone for that."""
    server = start_redis(redis_kind, "--maxmemory-policy", "noeviction")
    cache = RedisReplayCache(server.url + PATIENT, clock=clock)
    record = completed(clock)
    key = filled(cache, record)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        for _ in range(3):
            another = a_key()
            cache.put(another, record, missed_at=missed(cache, another))
        missed(cache, another)
        assert record == cache.get(key)
        client.config_set("maxmemory", 0)
    filled(cache, record)
    cache.close()

    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "takes no more of them" in caplog.text


def test_any_eviction_policy_will_do(start_redis: StartRedis, redis_kind: str, clock: FrozenClock) -> None:
    """What is evicted is asked of the system again."""
    server = start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru", "--maxmemory", "3mb")
    cache = RedisReplayCache(server.url + PATIENT, clock=clock)
    large = completed(clock, payload=replace(PAYLOAD, data=bytes(100_000)))
    keys = [filled(cache, large) for _ in range(40)]
    found = [isinstance(cache.get(key), Record) for key in keys]
    cache.close()

    assert {True, False} == set(found)


def test_a_dead_server_is_no_error(
    start_redis: StartRedis, redis_kind: str, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It has nothing, and takes nothing; used again when it is back. Neither key nor password is logged."""
    caplog.set_level(logging.INFO, logger="flask_idempotency")
    server, ticking = start_redis(redis_kind), FrozenClock()
    url = server.url.replace("127.0.0.1", ":s3cret@127.0.0.1")
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "s3cret")
    cache = RedisReplayCache(url + PATIENT, clock=clock, monotonic=ticking)
    key = filled(cache, completed(clock))
    server.kill()

    assert Missed() == cache.get(key)
    cache.put(key, completed(clock), missed_at=int(clock.now * 1_000_000))

    server.restart()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "s3cret")
    assert Missed() == cache.get(key)
    ticking.advance(1)
    filled(cache, completed(clock))
    cache.close()
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO"]
    assert "s3cret" not in caplog.text
    assert layout.cached_response(key).decode() not in caplog.text
