"""Looking after unsettled records of a Redis that is full, cut off, or knows no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import RecordPage, UnfinishedCounts
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import OnExpiry, State
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.janitor import FREED_MS
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.stores.unsettled import indexed, keys, seen, stale


@pytest.fixture
def full(start_redis: StartRedis, redis_kind: str, clock: FrozenClock) -> Iterator[tuple[RedisStore, redis.Redis]]:
    server = start_redis(redis_kind)
    store = redis_store(server.url, clock=clock)
    with redis.Redis.from_url(server.url) as client:
        yield store, client
    store.close()


@pytest.mark.parametrize("quota", (None, Quota(records=1000)), ids=("not counted", "counted"))
def test_a_full_server_is_looked_after_all_the_same(
    full: tuple[RedisStore, redis.Redis], clock: FrozenClock, quota: Quota | None
) -> None:
    """Most of all then: each is found, quarantined, given to a resolver, and settled or freed."""
    store, client = full
    tid = a_key().tid
    for on_lapse in (OnExpiry.QUARANTINE,) * 3 + (OnExpiry.TAKEOVER,):
        granted(store.claim(a_request(a_key(tid=tid), on_lapse=on_lapse), token=a_token(), lease=LEASE, quota=quota))
    answered, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(answered), token=token, lease=LEASE, quota=quota))
    store.complete(answered, token, PAYLOAD, keep=KEEP)
    clock.advance(LEASE)
    client.config_set("maxmemory", 1)

    (sheet,) = stale(store)
    assert [True] * 3 + [False] == sorted(
        (store.recovery.quarantine_expired(each, horizon=clock.now) for each in sheet.found), reverse=True
    )
    first, second, third = store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10)
    assert store.recovery.resolve(first, token=a_token(), payload=PAYLOAD, keep=KEEP)
    assert store.recovery.force_release(second)
    assert store.recovery.force_release(seen(store, answered))
    assert (1, 1) == (store.recovery.counts().lapsed, store.recovery.counts().quarantined)
    if quota is not None:
        client.config_set("maxmemory", 0)
        assert (Usage(3, PAYLOAD.byte_size, 0), Drift()) == (store.ledger.usage(tid), store.ledger.reconcile(tid))
    assert State.QUARANTINED is found(store, third.key).state


def test_a_full_server_mends_its_indexes(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    """It puts in what it takes out elsewhere."""
    store, client = full
    held = a_key()
    stand(store, clock, held, "quarantined")
    names = layout.keys(held)
    client.zadd(names[1], {layout.name(names): 0})
    client.delete(names[2])
    client.config_set("maxmemory", 1)

    assert keys(stale(store)) == []
    assert [False, True] == indexed(client, held)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: TcpProxy, clock: FrozenClock) -> Iterator[RedisStore]:
    """The same records, through the proxy."""
    store = redis_store(f"redis://127.0.0.1:{proxy.port}/0", clock=clock)
    store.recovery.counts()
    yield store
    store.close()


@pytest.mark.parametrize("lose", ("lose_request", "lose_reply"))
@pytest.mark.parametrize("verb", ("settle", "free", "walk", "standing"))
def test_a_broken_line_is_mended(
    store: RedisStore, far: RedisStore, proxy: TcpProxy, clock: FrozenClock, verb: str, lose: str
) -> None:
    """The client repeats what it sent, a script or many, and nobody notices."""
    key, token = a_key(), a_token()
    stand(store, clock, key, "quarantined")
    before = seen(store, key)
    calls: dict[str, Callable[[], object]] = {
        "settle": lambda: far.recovery.resolve(before, token=token, payload=PAYLOAD, keep=KEEP),
        "free": lambda: far.recovery.force_release(before),
        "walk": lambda: far.recovery.scan(State.QUARANTINED, limit=10),
        "standing": lambda: far.recovery.counts(),
    }
    expected: dict[str, object] = {
        "settle": True,
        "free": True,
        "walk": RecordPage((before,), None),
        "standing": UnfinishedCounts(quarantined=1, quarantined_for=0.0),
    }
    getattr(proxy, lose)()

    assert expected[verb] == calls[verb]()


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "completed"))
@pytest.mark.parametrize("again", (False, True), ids=("free", "in flight again"))
def test_a_call_that_has_freed_a_key_is_told_so_when_it_is_repeated(
    full: tuple[RedisStore, redis.Redis],
    clock: FrozenClock,
    monkeypatch: pytest.MonkeyPatch,
    standing: Any,
    again: bool,
) -> None:
    """
    Whatever became of the key since, and on a full server too. Whoever comes second is told that it was somebody else.
    """
    store, client = full
    key, call = a_key(), a_token()
    stand(store, clock, key, standing)
    before = seen(store, key)
    monkeypatch.setattr("flask_idempotency.stores.redis.admin.janitor.new_token", lambda: call)
    client.config_set("maxmemory", 1)
    assert store.recovery.force_release(before)
    client.config_set("maxmemory", 0)
    if again:
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    after = store.read(key)

    assert store.recovery.force_release(before)
    monkeypatch.undo()
    assert not store.recovery.force_release(before)
    assert after == store.read(key)
    assert 0 < client.pttl(layout.freed(key)) <= FREED_MS


@pytest.mark.parametrize("verb", ("stale", "due", "standing"))
def test_a_server_that_forgot_the_scripts_is_told_again(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, verb: str
) -> None:
    """All that were sent together, and each is run once."""
    made = {a_key() for _ in range(5)}
    for key in made:
        stand(store, clock, key, "quarantined" if verb == "due" else "in flight")
    clock.advance(LEASE)
    redis_client.script_flush()
    match verb:
        case "stale":
            assert made == set(keys(stale(store)))
        case "due":
            due = store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10)
            assert sorted(made, key=lambda key: key.rid) == sorted((each.key for each in due), key=lambda key: key.rid)
        case _:
            assert UnfinishedCounts(lapsed=5, lapsed_for=0.0) == store.recovery.counts()


def test_a_dead_server_is_unavailable(start_redis: StartRedis, redis_kind: str) -> None:
    """And so is a replica, for whatever is to be changed."""
    server = start_redis(redis_kind)
    store, key = redis_store(server.url), a_key()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    before = seen(store, key)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")
    with pytest.raises(StoreUnavailable):
        store.recovery.force_release(before)
    server.kill()

    calls: tuple[Callable[[], object], ...] = (
        lambda: stale(store),
        lambda: store.recovery.quarantine_expired(before, horizon=1e10),
        lambda: store.recovery.next_for_resolver(horizon=1e10, least=1, most=1, limit=1),
        lambda: store.recovery.resolve(before, token=a_token(), payload=PAYLOAD, keep=KEEP),
        lambda: store.recovery.force_release(before),
        lambda: store.recovery.scan(State.QUARANTINED, limit=1),
        store.recovery.counts,
        store.task_log.now,
        store.health.findings,
    )
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    store.close()
