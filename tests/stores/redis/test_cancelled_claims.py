"""A claim that arrives after its client gave up leaves its key free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.claim import Claim, Dependencies
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.model import InFlight
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.waiting import Waiters
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.connection import RETRIES
from flask_idempotency.stores.redis.store import CANCELLED_MS, RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.tooling.processes import DEADLINE_SECONDS, eventually


@pytest.fixture
def far(store: RedisStore, proxy: TcpProxy, clock: FrozenClock) -> Iterator[RedisStore]:
    """The same records, through the proxy; every script is known to the server already."""
    token, key = a_token(), a_key()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)
    with closing(redis_store(f"redis://127.0.0.1:{proxy.port}/0", clock=clock)) as far:
        far.read(key)
        yield far


def arrive(proxy: TcpProxy, client: redis.Redis) -> None:
    """Have the server act upon the request that was delayed."""

    def acted() -> int:
        told = client.info("commandstats")
        return int(told["cmdstat_evalsha"]["calls"])

    before = acted()
    proxy.deliver()
    assert eventually(lambda: acted() > before)


def send_too_late(far: RedisStore, proxy: TcpProxy, key: StorageKey, token: bytes) -> None:
    """Claim over a line that holds the claim back, and loses what the client sends to mend that."""
    proxy.delay_request()
    for _ in range(RETRIES):
        proxy.lose_request()
    with pytest.raises(StoreUnavailable):
        far.claim(a_request(key), token=token, lease=LEASE)


def nothing(store: RedisStore, key: StorageKey) -> None:
    """Nobody else comes by."""


def another(store: RedisStore, key: StorageKey) -> None:
    """Somebody else claims the key and gives it back."""
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)


@pytest.mark.parametrize("meanwhile", (nothing, another))
def test_a_claim_that_arrives_after_its_cancellation_is_not_granted(
    store: RedisStore,
    far: RedisStore,
    proxy: TcpProxy,
    redis_client: redis.Redis,
    meanwhile: Callable[[RedisStore, StorageKey], None],
) -> None:
    """Else it would be in flight for a lease, and quarantined then, without anybody having begun its work."""
    key, token = a_key(), a_token()
    send_too_late(far, proxy, key, token)
    store.release(key, token)
    meanwhile(store, key)

    arrive(proxy, redis_client)

    assert store.read(key) is None
    assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).attempt == 1


def test_a_claim_cancelled_while_another_owns_the_key_is_not_granted(
    store: RedisStore, far: RedisStore, proxy: TcpProxy, redis_client: redis.Redis
) -> None:
    key, token, others = a_key(), a_token(), a_token()
    send_too_late(far, proxy, key, token)
    granted(store.claim(a_request(key), token=others, lease=LEASE))
    with pytest.raises(LeaseLost):
        store.release(key, token)
    store.release(key, others)

    arrive(proxy, redis_client)

    assert store.read(key) is None


def test_a_granted_claim_that_arrives_twice_is_granted_once(
    store: RedisStore, far: RedisStore, proxy: TcpProxy, redis_client: redis.Redis
) -> None:
    """The client repeated it because the first was held back; the second was granted, and what it was for is over."""
    key, token = a_key(), a_token()
    proxy.delay_request()
    granted(far.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)

    arrive(proxy, redis_client)

    assert store.read(key) is None


def test_a_refused_claim_that_arrives_again_is_not_granted(
    store: RedisStore, far: RedisStore, proxy: TcpProxy, redis_client: redis.Redis
) -> None:
    key, owner = a_key(), a_token()
    granted(store.claim(a_request(key), token=owner, lease=LEASE))
    proxy.delay_request()
    assert isinstance(far.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    store.release(key, owner)
    arrive(proxy, redis_client)

    assert store.read(key) is None


def test_a_cancellation_is_kept_for_a_minute(store: RedisStore, redis_client: redis.Redis) -> None:
    key, token = a_key(), a_token()
    store.release(key, token)

    assert 0 < redis_client.pttl(layout.cancelled(layout.keys(key), token)) <= CANCELLED_MS == 60_000


def test_a_full_server_keeps_a_cancellation(full: tuple[RedisStore, redis.Redis]) -> None:
    (store, client), key, token = full, a_key(), a_token()
    client.config_set("maxmemory", 1)
    store.release(key, token)
    client.config_set("maxmemory", 0)

    with pytest.raises(StoreUnavailable, match="cancelled"):
        store.claim(a_request(key), token=token, lease=LEASE)


def test_a_key_claimed_during_a_server_freeze_is_free_afterwards(
    start_redis: StartRedis, redis_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, key, policy, tried = start_redis(redis_kind), a_key(), Policy(), threading.Event()
    with closing(redis_store(f"{server.url}?socket_timeout=0.1")) as store:
        engine, release = engine_of(store), store.release

        def seen(key: StorageKey, token: bytes) -> None:
            try:
                release(key, token)
            finally:
                tried.set()

        monkeypatch.setattr(store, "release", seen)
        assert isinstance(engine.claim(a_request(a_key()), policy), Claim)
        server.pause()
        with pytest.raises(StoreUnavailable):
            engine.claim(a_request(key), policy)
        assert tried.wait(DEADLINE_SECONDS)
        server.resume()
        refused: list[object] = []

        def claimed() -> bool:
            try:
                outcome = engine.claim(a_request(key), policy)
            except StoreUnavailable:
                return False
            refused.extend(() if isinstance(outcome, Claim) else (outcome,))
            return isinstance(outcome, Claim)

        assert eventually(claimed)
        assert all(isinstance(outcome, InFlight) for outcome in refused)


def engine_of(store: RedisStore) -> Engine:
    renewer = LeaseRenewer()
    around = Dependencies(
        store=store,
        codec=EnvelopeCodec(),
        renewer=renewer,
        repeater=renewer,
        waiters=Waiters(2),
        observers=Observers([]),
    )
    return Engine(around)
