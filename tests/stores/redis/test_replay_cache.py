"""The cache of responses in Redis: lifetimes, erasures, and faults."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, RequestInfo, State
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.client import CACHE_SECONDS, make_cache_client, make_client
from flask_idempotency.stores.redis.encoding import ABOUT_TEXT_BYTES
from flask_idempotency.stores.redis.replay_cache import (
    FIRST_PAUSE_SECONDS,
    LARGEST_BYTES,
    LAST_PAUSE_SECONDS,
    REMEMBERED_MS,
    CircuitBreaker,
    RedisReplayCache,
)
from flask_idempotency.stores.tiered import Missed
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import KEEP, PAYLOAD, a_key
from tests.lab.redis import StartRedis
from tests.stores.cached import PATIENT, completed, filled, missed


@pytest.fixture
def cache(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisReplayCache]:
    cache = RedisReplayCache(redis_server.url + PATIENT, clock=clock)
    yield cache
    cache.close()


def test_a_cached_response_is_found(cache: RedisReplayCache, clock: FrozenClock) -> None:
    record = completed(clock)
    key = filled(cache, record)
    clock.advance(100)

    assert replace(record, remaining=KEEP - 100) == cache.get(key)


def test_a_miss_returns_the_time_of_the_cache(cache: RedisReplayCache, clock: FrozenClock) -> None:
    assert cache.get(a_key()) == Missed(at=int(clock.now * 1_000_000))


def test_without_a_clock_a_miss_returns_the_server_time(redis_server: RedisServer, redis_client: redis.Redis) -> None:
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


def test_the_clock_decides_if_an_entry_has_expired(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Redis is late with throwing keys away, and a frozen one does not do it at all."""
    key = filled(cache, completed(clock))
    clock.advance(KEEP - 0.125)
    assert isinstance(cache.get(key), Record)
    clock.advance(0.125)

    missed(cache, key)
    assert redis_client.exists(layout.cached_response(key))


def test_redis_expires_entries(cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """A cache that nobody sweeps must not grow for ever."""
    key = filled(cache, completed(clock))

    assert (KEEP - 60) * 1000 < redis_client.pttl(layout.cached_response(key)) <= KEEP * 1000


def test_no_key_contains_a_tenant_or_principal(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key = filled(cache, completed(clock))

    assert redis_client.keys() == [layout.cached_response(key)]
    assert re.fullmatch(rb"idm1:\{p[0-9a-f]{4}\}:c:[A-Za-z0-9_-]{43}", layout.cached_response(key))
    assert layout.cached_response(key) == layout.keys(key)[0].replace(b":r:", b":c:")


def test_a_late_fill_expires_at_the_same_time(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """The system said how long before the fill set out. On its way it was held up; the record's end did not move."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(KEEP / 2)
    cache.put(key, record, missed_at=at)

    assert replace(record, remaining=KEEP / 2) == cache.get(key)


def test_a_fill_after_expiry_is_dropped(
    cache: RedisReplayCache, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(KEEP)
    cache.put(key, record, missed_at=at)

    missed(cache, key)
    assert caplog.records == []


def test_a_clock_set_back_does_not_lengthen_a_lifetime(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Between the miss and the fill, as when a replica with another clock takes over."""
    key, record = a_key(), completed(clock)
    at = missed(cache, key)
    clock.advance(-86400)
    cache.put(key, record, missed_at=at)

    assert record == cache.get(key)


def test_the_response_of_a_later_claim_stays(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """Fences tell which is later, whichever arrives last."""
    late, early = completed(clock, fence=2**41), completed(clock, fence=2**41 - 1)
    key = filled(cache, late)
    cache.put(key, early, missed_at=int(clock.now * 1_000_000))

    assert late == cache.get(key)


@pytest.mark.parametrize("fence", (2**41, 2**41 + 1))
def test_the_response_of_an_earlier_claim_is_replaced(cache: RedisReplayCache, clock: FrozenClock, fence: int) -> None:
    key, record = filled(cache, completed(clock, fence=2**41)), completed(clock, fence=fence)
    cache.put(key, record, missed_at=int(clock.now * 1_000_000))

    assert record == cache.get(key)


def test_an_expired_later_response_does_not_block_a_fill(cache: RedisReplayCache, clock: FrozenClock) -> None:
    key = filled(cache, completed(clock, fence=9))
    clock.advance(KEEP)
    record = completed(clock, fence=8)
    cache.put(key, record, missed_at=missed(cache, key))

    assert record == cache.get(key)


def test_only_completed_records_are_cached(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A record in flight that was replayed from a cache would be in flight for ever."""
    at = int(clock.now * 1_000_000)
    for state in (State.PROCESSING, State.QUARANTINED):
        cache.put(a_key(), replace(completed(clock), state=state, payload=None), missed_at=at)

    assert redis_client.dbsize() == 0


def test_a_response_that_is_too_large_is_not_cached(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    at = int(clock.now * 1_000_000)
    for record in (
        completed(clock, about=RequestInfo(principal="p" * (ABOUT_TEXT_BYTES + 1))),
        completed(clock, payload=replace(PAYLOAD, data=bytes(LARGEST_BYTES))),
        replace(completed(clock), attempt=256),
        replace(completed(clock), remaining=0.0),
    ):
        cache.put(a_key(), record, missed_at=at)

    assert redis_client.dbsize() == 0


def test_get_and_put_take_one_command_each(redis_server: RedisServer, clock: FrozenClock) -> None:
    with TcpProxy(redis_server.port) as proxy:
        cache, key = RedisReplayCache(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}", clock=clock), a_key()
        filled(cache, completed(clock))
        before = proxy.requests, proxy.chunks
        cache.put(key, completed(clock), missed_at=missed(cache, key))
        cache.get(key)
        cache.close()

        assert (proxy.requests - before[0], proxy.chunks - before[1]) == (3, 3)


def test_the_cache_accepts_a_client_of_the_application(
    redis_client: redis.Redis, redis_server: RedisServer, clock: FrozenClock
) -> None:
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        cache = RedisReplayCache(client, clock=clock)
        filled(cache, completed(clock))
        held: Any = client.connection_pool.get_connection()
        cache.close()

        assert held.is_connected
        client.connection_pool.release(held)


def test_the_cache_has_short_timeouts_and_no_retry() -> None:
    with make_cache_client("redis://127.0.0.1:1/0") as client:
        options = client.connection_pool.connection_kwargs

    assert (options["socket_connect_timeout"], options["socket_timeout"]) == (CACHE_SECONDS, CACHE_SECONDS)
    assert options["retry"].get_retries() == 0
    assert CACHE_SECONDS <= 0.05


def test_an_operator_waits_for_the_cache_as_for_a_store() -> None:
    """A purge of personal data must not fail because a busy server needs a tenth of a second."""
    with make_cache_client("redis://127.0.0.1:1/0", patient=True) as client:
        options = client.connection_pool.connection_kwargs

    with make_client("redis://127.0.0.1:1/0") as store:
        waits = store.connection_pool.connection_kwargs
    for time in ("socket_connect_timeout", "socket_timeout"):
        assert options[time] == waits[time] >= 1.0


@pytest.mark.parametrize("call", ("erase", "invalidate"))
def test_an_operators_call_is_repeated_and_has_a_breaker_of_its_own(
    redis_server: RedisServer, clock: FrozenClock, call: str
) -> None:
    with TcpProxy(redis_server.port) as proxy:
        cache = RedisReplayCache(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}", clock=clock, monotonic=lambda: 0.0)
        key = filled(cache, completed(clock))
        proxy.lose_reply()
        assert cache.get(key) == Missed()  # The breaker of requests skips the cache from now on, at this time.
        proxy.lose_reply()

        assert cache.erase(key.tid) if call == "erase" else cache.invalidate(key, fence=1 << 40)
        assert cache.get(key) == Missed()
        cache.close()

    with closing(RedisReplayCache(redis_server.url + PATIENT, clock=clock)) as beside:
        assert isinstance(beside.get(key), Missed)


def test_the_url_may_set_longer_timeouts() -> None:
    with make_cache_client("redis://127.0.0.1:1/0?socket_timeout=0.5") as client:
        assert client.connection_pool.connection_kwargs["socket_timeout"] == 0.5


def test_a_url_that_names_no_server_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_REDIS_URL") as raised:
        RedisReplayCache("redis://:p4ss/w0rd@host")

    assert "p4ss" not in str(raised.value)


def test_a_cached_response_of_an_erased_tenant_is_not_replayed(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key, record = filled(cache, completed(clock)), completed(clock)
    neighbour = StorageKey(rid=key.rid[::-1], tid=key.tid[:2] + bytes(14))
    cache.put(neighbour, record, missed_at=missed(cache, neighbour))

    assert cache.erase(key.tid)
    missed(cache, key)
    assert record == cache.get(neighbour)
    assert not redis_client.exists(layout.cached_response(key))


def test_a_fill_during_an_erasure_is_dropped(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
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


def test_an_erasure_covers_entries_that_redis_still_holds(
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


def test_a_clock_set_back_keeps_an_erasure(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """A later one counts from the earlier one's time."""
    key = filled(cache, completed(clock))
    cache.erase(key.tid)
    clock.advance(-3600)
    cache.erase(key.tid)
    clock.advance(1800)
    cache.put(key, completed(clock), missed_at=int(clock.now * 1_000_000))

    missed(cache, key)


@pytest.mark.parametrize("text", ("nan", "", "later", "inf"))
def test_an_unreadable_erasure_still_counts_as_one(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock, text: str
) -> None:
    key = filled(cache, completed(clock))
    redis_client.set(layout.cache_erasure(key.tid), text)

    assert isinstance(cache.get(key), Missed)


def test_an_erasure_lasts_as_long_as_responses_are_kept(cache: RedisReplayCache, redis_client: redis.Redis) -> None:
    tid = a_key().tid
    cache.erase(tid)

    assert 0 < redis_client.pttl(layout.cache_erasure(tid)) <= REMEMBERED_MS


def test_an_erased_response_from_the_system_is_not_cached(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Told by the cache it would be no longer erased."""
    cache.put(a_key(), replace(completed(clock), erased=True), missed_at=int(clock.now * 1_000_000))

    assert redis_client.dbsize() == 0


def test_an_unreachable_cache_reports_no_erasure() -> None:
    cache = RedisReplayCache("redis://127.0.0.1:1/0")

    assert not cache.erase(a_key().tid)
    assert not cache.erase(a_key().tid)


def sealed(client: redis.Redis, key: StorageKey) -> bytes:
    data = client.get(layout.cached_response(key))
    assert isinstance(data, bytes)
    return data


@pytest.mark.parametrize("spoilt", ("a bit", "cut short", "the sum alone", "another key's", "of another type"))
def test_an_unreadable_entry_is_dropped(
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
def test_our_entries_stay_beside_foreign_ones(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock, which: str
) -> None:
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


def test_a_late_invalidation_keeps_out_later_invalidated_responses(cache: RedisReplayCache, clock: FrozenClock) -> None:
    """The first one was stuck on its way, and its key was used again."""
    key = a_key()
    at = missed(cache, key)
    for fence in (8, 7):
        assert cache.invalidate(key, fence=fence)
    cache.put(key, completed(clock, fence=8), missed_at=at)
    missed(cache, key)
    cache.put(key, completed(clock, fence=9), missed_at=at)

    assert isinstance(cache.get(key), Record)


def test_scripts_are_loaded_again_after_script_flush(
    cache: RedisReplayCache, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    filled(cache, completed(clock))
    redis_client.flushall()
    redis_client.script_flush()

    filled(cache, completed(clock))


def test_a_full_cache_still_replays(
    start_redis: StartRedis, redis_kind: str, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "refuses writes" in caplog.text


def test_the_cache_accepts_any_eviction_policy(start_redis: StartRedis, redis_kind: str, clock: FrozenClock) -> None:
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


MILLISECOND = 0.001


@pytest.fixture
def breaker(clock: FrozenClock) -> CircuitBreaker:
    return CircuitBreaker("The server", monotonic=clock)


def fail(breaker: CircuitBreaker) -> None:
    turn = breaker.turn()
    assert turn is not None
    breaker.failed(turn, "TimeoutError")


def succeed(breaker: CircuitBreaker) -> None:
    turn = breaker.turn()
    assert turn is not None
    breaker.succeeded(turn)


def test_calls_pass_while_the_circuit_is_closed(breaker: CircuitBreaker) -> None:
    assert None not in [breaker.turn() for _ in range(100)]


def test_a_failure_opens_the_circuit_for_a_second(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS - MILLISECOND)

    assert breaker.turn() is None


def test_one_trial_call_passes_and_the_others_do_not_wait(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """What was not there a second ago may still be away, and cost each of them a time-out."""
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)

    assert [breaker.turn() is None for _ in range(3)] == [False, True, True]


def test_pauses_double_up_to_half_a_minute(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """A server that is away for the night costs two time-outs a minute."""
    fail(breaker)
    pauses = []
    for _ in range(7):
        before = clock.now
        while (turn := breaker.turn()) is None:
            clock.advance(FIRST_PAUSE_SECONDS)
        pauses.append(clock.now - before)
        breaker.failed(turn, "TimeoutError")

    assert pauses == [1, 2, 4, 8, 16, LAST_PAUSE_SECONDS, LAST_PAUSE_SECONDS]


def test_one_success_closes_the_circuit(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    for _ in range(4):
        fail(breaker)
        clock.advance(LAST_PAUSE_SECONDS)
    succeed(breaker)
    assert None not in [breaker.turn() for _ in range(3)]

    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_concurrent_failures_count_once(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """A hundred threads in one time-out are one outage of a second, not of half a minute."""
    turns = [breaker.turn() for _ in range(100)]
    for turn in turns:
        assert turn is not None
        breaker.failed(turn, "TimeoutError")
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_a_success_that_began_before_the_failure_does_not_count(breaker: CircuitBreaker) -> None:
    early = breaker.turn()
    assert early is not None
    fail(breaker)
    breaker.succeeded(early)

    assert breaker.turn() is None


def test_a_lost_trial_call_blocks_no_other_call(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """Its worker was killed. The next one tries after as long as if it had failed."""
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)
    assert breaker.turn() is not None
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_opening_and_closing_are_logged_once_each(
    breaker: CircuitBreaker, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flask_idempotency")
    for _ in range(3):
        fail(breaker)
        clock.advance(LAST_PAUSE_SECONDS)
    succeed(breaker)
    succeed(breaker)

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "The server does not answer (TimeoutError): it is skipped, and retried from time to time"),
        ("INFO", "The server answers again"),
    ]
