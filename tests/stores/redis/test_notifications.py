"""Waiters in other processes wake when a record is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.model import OnExpiry, Unknown
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.notifications import IDLE_SECONDS
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.notifications import RedisNotifier
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
)
from tests.backends import BACKENDS, MakeStore
from tests.forgiving import redis_store
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis, connect
from tests.stores.owners import WRITES
from tests.stores.waiters import assert_a_forked_child_wakes_its_own, awaited, waiting
from tests.tooling.processes import DEADLINE_SECONDS, eventually

IN_REDIS = [name for name in BACKENDS if name.startswith(tuple(f"{kind}-" for kind in REDIS_KINDS))]


@pytest.mark.parametrize("backend", IN_REDIS)
def test_a_waiter_wakes_when_a_record_is_settled(
    backend: str, request: pytest.FixtureRequest, clock: FrozenClock
) -> None:
    with ExitStack() as ends:
        make: MakeStore = BACKENDS[backend](request, ends)
        store = make(clock)
        assert isinstance(store, RedisStore)
        key, token = a_key(), a_token()
        granted(store.claim(awaited(key), token=token, lease=LEASE))
        with waiting(store.notifier, key) as waiter:
            store.complete(key, token, PAYLOAD, keep=KEEP)
            assert waiter.is_woken()
        store.notifier.close()


SETTLEMENTS: dict[str, Callable[[RedisStore, SeenRecord, FrozenClock], object]] = {
    "complete": lambda store, seen, _: store.complete(seen.key, seen.record.token, PAYLOAD, keep=KEEP),
    "release": lambda store, seen, _: store.release(seen.key, seen.record.token),
    "quarantine": lambda store, seen, _: store.quarantine(seen.key, seen.record.token, "lost"),
    "free": lambda store, seen, _: store.recovery.force_release(seen),
    "lapse": lambda store, seen, clock: lapse(store, seen, clock),
    "claim": lambda store, seen, clock: claim_lapsed(store, seen, clock),
}


def lapse(store: RedisStore, seen: SeenRecord, clock: FrozenClock) -> None:
    clock.advance(LEASE + 1)
    assert store.recovery.quarantine_expired(seen, horizon=clock.now)


def claim_lapsed(store: RedisStore, seen: SeenRecord, clock: FrozenClock) -> None:
    clock.advance(LEASE + 1)
    assert isinstance(store.claim(a_request(seen.key), token=a_token(), lease=LEASE), Unknown)


@pytest.fixture
def heard(redis_server: RedisServer) -> Iterator[Callable[[], list[bytes]]]:
    """What was said on the channel so far, up to what the asker says itself."""
    with connect(redis_server.url) as client, closing(client.pubsub(ignore_subscribe_messages=True)) as pubsub:
        pubsub.subscribe(layout.SETTLED)
        assert pubsub.get_message(timeout=DEADLINE_SECONDS) is None

        def names() -> list[bytes]:
            client.publish(layout.SETTLED, "end")
            return list(iter(lambda: pubsub.get_message(timeout=DEADLINE_SECONDS)["data"], b"end"))

        yield names


@for_each("counted", (False, True), ids=("uncounted", "counted"))
@for_each("how", list(SETTLEMENTS))
def test_a_settled_key_is_published_once(
    store: RedisStore, clock: FrozenClock, heard: Callable[[], list[bytes]], how: str, counted: bool
) -> None:
    key, token = a_key(), a_token()
    quota = Quota(records=5) if counted else None
    granted(store.claim(awaited(key), token=token, lease=LEASE, quota=quota))

    SETTLEMENTS[how](store, SeenRecord(key, found(store, key)), clock)

    assert [layout.name(layout.keys(key))] == heard()


def test_a_key_without_waiters_is_not_published(store: RedisStore, heard: Callable[[], list[bytes]]) -> None:
    for write in WRITES.values():
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        write(store, key, token)

    assert [] == heard()


def test_a_marked_and_renewed_claim_keeps_its_waiters(store: RedisStore, heard: Callable[[], list[bytes]]) -> None:
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    store.mark_point_of_no_return(key, token)
    store.renew(key, token, lease=2 * LEASE)
    failed = replace(PAYLOAD, status=500, success=False)
    store.complete(key, token, failed, keep=KEEP)

    assert [layout.name(layout.keys(key))] == heard()
    assert failed == found(store, key).payload


def test_after_a_take_over_the_new_claim_decides_about_publishing(
    store: RedisStore, clock: FrozenClock, heard: Callable[[], list[bytes]]
) -> None:
    """It is another process' claim, perhaps of a release that lets nobody wait."""
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE))
    clock.advance(LEASE + 1)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert [] == heard()


def test_a_user_who_may_not_publish_still_settles(
    redis_server: RedisServer, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A user without rights to the channel: its answer is stored, and those who wait look for themselves."""
    redis_client.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], categories=["+@all"], reset_channels=True)
    with closing(redis_store(redis_server.url.replace("//", "//mute:any@"), clock=clock)) as store:
        for how in ("complete", "release", "quarantine"):
            key, token = a_key(), a_token()
            granted(store.claim(awaited(key), token=token, lease=LEASE))
            WRITES[how](store, key, token)
    redis_client.acl_deluser("mute")


@pytest.fixture
def quiet_server(start_redis: StartRedis, redis_kind: str) -> RedisServer:
    """To which nobody listens still from another test."""
    return start_redis(redis_kind)


def subscribers(server: RedisServer) -> int:
    with connect(server.url) as client:
        [(_, count)] = client.pubsub_numsub(layout.SETTLED)
        return int(count)


def test_one_subscription_serves_all_waiters(quiet_server: RedisServer) -> None:
    one, other = a_key(), a_key()
    with closing(redis_store(quiet_server.url)) as store:
        store.read(one)
        assert 0 == subscribers(quiet_server)
        with (
            waiting(store.notifier, one),
            store.notifier.subscribe([other], lambda: None),
            store.notifier.subscribe([one], lambda: None),
        ):
            assert 1 == subscribers(quiet_server)


def test_an_idle_subscription_is_closed(quiet_server: RedisServer) -> None:
    with connect(quiet_server.url) as client:
        bell, key = RedisNotifier(client.pubsub, idle_seconds=0.0), a_key()
        for _ in range(2):
            with waiting(bell, key):
                pass
            assert eventually(lambda: subscribers(quiet_server) == 0)


def test_closing_a_store_ends_its_subscription(quiet_server: RedisServer) -> None:
    """Otherwise it would stay for `IDLE_SECONDS`: a client of the application's own is not closed."""
    with connect(quiet_server.url) as client:
        store = RedisStore(client)
        with waiting(store.notifier, a_key()):
            listener = store.notifier._thread
        store.close()
        assert listener is not None
        listener.join(IDLE_SECONDS / 2)
        assert not listener.is_alive()


def test_a_cut_subscription_is_replaced(store: RedisStore, redis_client: redis.Redis) -> None:
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with waiting(store.notifier, key) as waiter:
        redis_client.client_kill_filter(_type="pubsub")
        assert waiter.is_woken()
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()


def test_the_listener_reconnects_after_a_restart(
    start_redis: StartRedis, redis_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, key = start_redis(redis_kind), a_key()
    caplog.set_level("INFO", "flask_idempotency")
    with closing(redis_store(server.url)) as store, waiting(store.notifier, key) as waiter:
        server.kill()
        assert eventually(lambda: "notifications are interrupted" in caplog.text)
        server.restart()
        assert waiter.is_woken()
        token = a_token()
        granted(store.claim(awaited(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()
    told = [record.getMessage() for record in caplog.records if "notifications" in record.getMessage()]
    assert [True, False] == ["notifications are interrupted" in text for text in told]


def test_the_listener_notices_a_silent_server(start_redis: StartRedis, redis_kind: str) -> None:
    """A connection that was lost without a word would be listened to for ever."""
    server, key = start_redis(redis_kind), a_key()
    with connect(server.url, socket_timeout=0.2) as client:
        bell = RedisNotifier(client.pubsub, ping_after_seconds=0.0, idle_seconds=0.0)
        with waiting(bell, key) as waiter:
            server.pause()
            assert eventually(lambda: bell.disconnected)
            server.resume()
            assert waiter.is_woken()


def test_a_forked_child_has_its_own_subscription(store: RedisStore) -> None:
    assert_a_forked_child_wakes_its_own(store)
