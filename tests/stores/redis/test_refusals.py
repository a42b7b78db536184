"""A Redis that is there and says no: a replica, or one that is out of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import OnExpiry, Replayed, State, Unknown
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.connection import PooledConnection
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, PAYLOAD, a_key, a_request, a_token, found, granted, stand
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.stores.owners import WRITES


def test_a_replica_grants_nothing(start_redis: StartRedis, redis_kind: str) -> None:
    """It may not write, and what it has read may be old."""
    server = start_redis(redis_kind)
    store = redis_store(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    store.close()


def test_a_demoted_server_is_not_asked_again(start_redis: StartRedis, redis_kind: str) -> None:
    """Behind a DNS name or a proxy the next connection leads to the new primary. No pooled one may keep to the old."""
    server = start_redis(redis_kind)
    with make_client(server.url) as client, redis.Redis.from_url(server.url) as operator:
        pool, line = client.connection_pool, PooledConnection(client)
        idle, used = pool.get_connection(), pool.get_connection()
        pool.release(idle)
        pool.release(used)
        operator.replicaof("127.0.0.1", "1")

        with pytest.raises(redis.exceptions.ResponseError, match="read only replica"):
            line("EVAL", "return redis.call('SET', KEYS[1], 'v')", "1", "k")

        assert [connection.is_connected for connection in (idle, used)] == [False, False]


def test_a_replica_without_its_primary_is_not_asked_again(start_redis: StartRedis, redis_kind: str) -> None:
    """It answers MASTERDOWN to everything, and so it would for as long as it is asked."""
    server = start_redis(redis_kind, "--replica-serve-stale-data", "no")
    with make_client(server.url) as client, redis.Redis.from_url(server.url) as operator:
        pool, line = client.connection_pool, PooledConnection(client)
        used = pool.get_connection()
        pool.release(used)
        operator.replicaof("127.0.0.1", "1")

        with pytest.raises(redis.exceptions.MasterDownError):
            line("EVAL", "return redis.call('GET', KEYS[1])", "1", "k")

        assert not used.is_connected


@pytest.fixture
def full(start_redis: StartRedis, redis_kind: str, clock: FrozenClock) -> Iterator[tuple[RedisStore, redis.Redis]]:
    server = start_redis(redis_kind)
    store = redis_store(server.url, clock=clock)
    with redis.Redis.from_url(server.url) as client:
        yield store, client
    store.close()


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("anything", 1)


def test_a_full_server_grants_nothing(full: tuple[RedisStore, redis.Redis]) -> None:
    """The claim is refused before anything was written: no record, no index, no fence."""
    store, client = full
    fill(client)

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    assert client.keys() == []


def test_a_full_server_takes_over_nothing(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    """Taking over is claiming. The lapsed record stays as it was."""
    store, client = full
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    before = found(store, key)
    fill(client)

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert before == found(store, key)


def test_a_full_server_still_takes_what_owners_write(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    """The payment has been made: its answer must be stored. On Redis 6.2 too, which knows no flags for scripts."""
    store, client = full
    keys = {verb: (a_key(), a_token()) for verb in WRITES}
    for key, token in keys.values():
        granted(store.claim(a_request(key, on_lapse=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    fill(client)

    for verb, (key, token) in keys.items():
        WRITES[verb](store, key, token)

    assert found(store, keys["renew"][0]).remaining == 2 * LEASE
    assert found(store, keys["mark_point_of_no_return"][0]).on_expiry is OnExpiry.QUARANTINE
    assert found(store, keys["complete"][0]).payload == PAYLOAD
    assert store.read(keys["release"][0]) is None
    assert found(store, keys["quarantine"][0]).state is State.QUARANTINED


def test_a_full_server_still_answers_retries(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    """Replaying needs no memory, and quarantining what has lapsed is a duty."""
    store, client = full
    done, lapsed = a_key(), a_key()
    stand(store, clock, done, "completed")
    stand(store, clock, lapsed, "lapsed, quarantine")
    fill(client)

    assert isinstance(store.claim(a_request(done), token=a_token(), lease=LEASE), Replayed)
    assert Unknown("lease-expired") == store.claim(a_request(lapsed), token=a_token(), lease=LEASE)
