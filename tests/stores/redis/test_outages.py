"""Redis is silent, down, full or a replica: what the caller gets, and what the store holds afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import pytest
import redis
import valkey

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import InFlight, OnExpiry, Record, State, Unknown
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.client import REPLY_SECONDS, make_client
from flask_idempotency.stores.redis.connection import RETRIES, DirectConnection, PooledConnection
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    stand,
)
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.stores.owners import WRITES

Lost = Literal["request", "reply"]


@pytest.fixture
def proxied_store(proxy: TcpProxy, clock: FrozenClock) -> Iterator[RedisStore]:
    """Through the proxy, every script known to the server already: one request each."""
    proxied_store = redis_store(f"redis://127.0.0.1:{proxy.port}/0", clock=clock)
    warm_up(proxied_store)
    yield proxied_store
    proxied_store.close()


def warm_up(proxied_store: RedisStore) -> None:
    for write in WRITES.values():
        key, token = a_key(), a_token()
        granted(proxied_store.claim(a_request(key), token=token, lease=LEASE))
        write(proxied_store, key, token)
        proxied_store.read(key)


def lose(proxy: TcpProxy, what: Lost) -> None:
    if what == "request":
        proxy.lose_request()
    else:
        proxy.lose_reply()


@for_each("what", ("request", "reply"))
def test_a_claim_survives_a_broken_connection(proxied_store: RedisStore, proxy: TcpProxy, what: Lost) -> None:
    key, token = a_key(), a_token()
    before = proxy.requests
    lose(proxy, what)

    grant = granted(proxied_store.claim(a_request(key), token=token, lease=LEASE))

    assert proxy.requests - before == 2
    assert (grant.attempt, found(proxied_store, key).fence) == (1, grant.fence)
    assert isinstance(proxied_store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)


@for_each("what", ("request", "reply"))
@for_each("verb", list(WRITES))
def test_a_write_survives_a_broken_connection(
    proxied_store: RedisStore, proxy: TcpProxy, verb: str, what: Lost
) -> None:
    key, token, twin, twins = a_key(), a_token(), a_key(), a_token()
    for each, its in ((key, token), (twin, twins)):
        granted(proxied_store.claim(a_request(each, on_expiry=OnExpiry.TAKEOVER), token=its, lease=LEASE))
    before = proxy.requests
    lose(proxy, what)

    WRITES[verb](proxied_store, key, token)

    assert proxy.requests - before == 2
    WRITES[verb](proxied_store, twin, twins)
    assert comparable(proxied_store, key) == comparable(proxied_store, twin)


def comparable(proxied_store: RedisStore, key: StorageKey) -> object:
    record = proxied_store.read(key)
    return record and (record.state, record.on_expiry, record.deadline, record.payload, record.reason)


@pytest.mark.parametrize("what", ("request", "reply"))
def test_a_connection_that_stays_broken_is_unavailable(proxied_store: RedisStore, proxy: TcpProxy, what: Lost) -> None:
    key, token = a_key(), a_token()
    for _ in range(1 + RETRIES):
        lose(proxy, what)

    with pytest.raises(StoreUnavailable) as raised:
        proxied_store.claim(a_request(key), token=token, lease=LEASE)

    assert isinstance(raised.value.__cause__, redis.exceptions.RedisError)
    assert (proxied_store.read(key) is None) == (what == "request")
    assert granted(proxied_store.claim(a_request(key), token=token, lease=LEASE)).attempt == 1


@for_each("verb", ("claim", "read", *WRITES))
def test_one_call_is_one_round_trip(proxied_store: RedisStore, proxy: TcpProxy, verb: str) -> None:
    """A first request makes two of these calls, a replay, a conflict and a mismatch one."""
    key, token = a_key(), a_token()
    if verb != "claim":
        granted(proxied_store.claim(a_request(key), token=token, lease=LEASE))
    before, sent = proxy.requests, proxy.chunks

    call(proxied_store, verb, key, token)

    assert (proxy.requests - before, proxy.chunks - sent) == (1, 1)


def call(proxied_store: RedisStore, verb: str, key: StorageKey, token: bytes) -> None:
    if verb == "claim":
        proxied_store.claim(a_request(key), token=token, lease=LEASE)
    elif verb == "read":
        proxied_store.read(key)
    else:
        WRITES[verb](proxied_store, key, token)


@for_each("verb", ("claim", "read", *WRITES))
def test_scripts_are_loaded_again_after_script_flush(
    proxied_store: RedisStore, redis_client: redis.Redis, verb: str
) -> None:
    key, token = a_key(), a_token()
    granted(proxied_store.claim(a_request(key), token=token, lease=LEASE))
    redis_client.script_flush()

    call(proxied_store, verb, key, token)


@pytest.mark.slow
def test_a_dead_server_is_unavailable(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind)
    proxied_store, key = redis_store(server.url), a_key()
    proxied_store.claim(a_request(key), token=a_token(), lease=LEASE)
    server.kill()

    for verb in ("claim", "read", *WRITES):
        with pytest.raises(StoreUnavailable) as raised:
            call(proxied_store, verb, key, a_token())
        assert isinstance(raised.value.__cause__, redis.exceptions.ConnectionError)
        assert layout.name(layout.keys(key)).decode() not in str(raised.value)
    proxied_store.close()


def exceptions_of(library: ModuleType) -> list[type[Exception]]:
    kinds = [kind for kind in vars(library.exceptions).values() if isinstance(kind, type)]
    return sorted((kind for kind in kinds if issubclass(kind, Exception)), key=lambda kind: kind.__name__)


def raised_by(kind: type[Exception]) -> Exception:
    """With the text of a script that the operator ended, where the class takes one."""
    if kind.__name__ in ("AskError", "MovedError"):
        return kind("7 127.0.0.1:7000")
    return kind("Error running script (call to f_1): Script killed by user with SCRIPT KILL.")


@for_each(
    ("client", "kind"),
    [(redis.Redis, kind) for kind in exceptions_of(redis)]
    + [(valkey.Valkey, kind) for kind in exceptions_of(valkey)]
    + [(redis.Redis, OSError)],
)
def test_every_exception_of_a_client_library_is_unavailable(client: type[Any], kind: type[Exception]) -> None:
    class Failing(client):  # type: ignore[misc]
        def execute_command(self, *command: object, **options: object) -> object:
            raise raised_by(kind)

    for verb in ("claim", "read", *WRITES):
        with pytest.raises(StoreUnavailable):
            call(redis_store(Failing()), verb, a_key(), a_token())


@pytest.mark.parametrize("warm", (True, False), ids=("in mid-conversation", "from the start"))
def test_a_silent_server_costs_three_timeouts(
    start_redis: StartRedis, redis_kind: str, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """A worker waits one second for each, and no retry of one layer is multiplied by that of another."""
    assert (REPLY_SECONDS, 1 + RETRIES) == (1.0, 3)

    server = start_redis(redis_kind)
    proxied_store = redis_store(f"{server.url}?socket_timeout=0.3")
    if warm:
        warm_up(proxied_store)
    awaited = count_replies(monkeypatch)
    server.pause()
    with pytest.raises(StoreUnavailable):
        proxied_store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    server.resume()
    proxied_store.close()

    assert [kind.__name__ for kind in awaited] == ["TimeoutError"] * (1 + RETRIES)


def count_replies(monkeypatch: pytest.MonkeyPatch) -> list[type[Exception]]:
    """A list that grows by one whenever a reply was waited for in vain."""
    in_vain: list[type[Exception]] = []

    def counted(read: Callable[..., object]) -> Callable[..., object]:
        def reading(self: object, *args: object, **options: object) -> object:
            try:
                return read(self, *args, **options)
            except (redis.exceptions.TimeoutError, TimeoutError) as error:
                in_vain.append(type(error))
                raise

        return reading

    # A new connection greets by redis-py's own methods.
    monkeypatch.setattr(redis.Connection, "read_response", counted(redis.Connection.read_response))
    monkeypatch.setattr(DirectConnection, "_received", counted(DirectConnection._received))
    return in_vain


def test_a_replica_grants_no_claim(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind)
    store = redis_store(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    store.close()


def test_a_script_that_a_demoted_server_refuses_closes_its_connections(
    start_redis: StartRedis, redis_kind: str
) -> None:
    """
    Behind a DNS name or a proxy the next connection leads to the new primary. No pooled one may keep to the old. Redis 6.2
    says in the middle of a sentence that it is a replica.
    """
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


def test_connections_to_a_replica_without_primary_are_closed(start_redis: StartRedis, redis_kind: str) -> None:
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


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("anything", 1)


def test_a_full_server_grants_no_claim(full: tuple[RedisStore, redis.Redis]) -> None:
    store, client = full
    fill(client)

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    assert client.keys() == []


def test_a_full_server_allows_no_take_over(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    store, client = full
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    before = found(store, key)
    fill(client)

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert before == found(store, key)


def test_a_full_server_accepts_writes_of_owners(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    """The payment has been made: its answer must be stored. On Redis 6.2 too, which knows no flags for scripts."""
    store, client = full
    keys = {verb: (a_key(), a_token()) for verb in WRITES}
    for key, token in keys.values():
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    fill(client)

    for verb, (key, token) in keys.items():
        WRITES[verb](store, key, token)

    assert found(store, keys["renew"][0]).remaining == 2 * LEASE
    assert found(store, keys["mark_point_of_no_return"][0]).on_expiry is OnExpiry.QUARANTINE
    assert found(store, keys["complete"][0]).payload == PAYLOAD
    assert store.read(keys["release"][0]) is None
    assert found(store, keys["quarantine"][0]).state is State.QUARANTINED


def test_a_full_server_still_replays(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    store, client = full
    done, lapsed = a_key(), a_key()
    stand(store, clock, done, "completed")
    stand(store, clock, lapsed, "lapsed, quarantine")
    fill(client)

    assert isinstance(store.claim(a_request(done), token=a_token(), lease=LEASE), Record)
    assert Unknown("lease-expired") == store.claim(a_request(lapsed), token=a_token(), lease=LEASE)
