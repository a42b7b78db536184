"""Damaged data under the store's keys: the caller gets an error, and no completed request runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, SealedBy, StoredPayload
from flask_idempotency.engine.quota import Drift, NewKeys, Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.janitor import Index
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
    stand,
)
from tests.damage import damaged, outcome, questions
from tests.forgiving import redis_store
from tests.stores.owners import WRITES


def spoil(data: bytes, spoilt: str) -> bytes:
    match spoilt:
        case "newer format":
            return bytes([data[0] | 0xE0]) + data[1:]
        case "unknown state":
            return bytes([data[0] & 0xE7]) + data[1:]
        case "cut short":
            return data[:40]
        case "no longer ends":
            return data[:77] + b"\xff\xff\xff" + data[80:]
        case _:
            return b""


@for_each("spoilt", ("newer format", "unknown state", "cut short", "no longer ends", "empty"))
@for_each("standing", ("in flight", "completed", "quarantined"))
def test_an_unreadable_record_is_corrupt(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Standing, spoilt: str
) -> None:
    """Never absent, which would run the payment again; and no call changes a byte of it."""
    key = a_key()
    token = stand(store, clock, key, standing)
    record = layout.keys(key)[0]
    stored = redis_client.get(record)
    assert isinstance(stored, bytes)
    data = spoil(stored, spoilt)
    redis_client.set(record, data)

    refused(store, key, token)

    assert redis_client.get(record) == data


@pytest.mark.parametrize("which", (0, 1, 2, 3), ids=("record", "in flight", "quarantined", "partition"))
def test_a_key_of_another_type_is_corrupt(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, which: int
) -> None:
    """Somebody else's key in our place is found before the first write: scripts cannot be undone."""
    key = a_key()
    token = stand(store, clock, key, "in flight")
    keys = layout.keys(key)
    redis_client.delete(keys[which])
    redis_client.lpush(keys[which], "not ours")
    before = redis_client.dump(keys[0])

    match which:
        case 0:
            refused(store, key, token)
        case 1:
            with pytest.raises(CorruptRecord):
                store.renew(key, token, lease=2 * LEASE)
            with pytest.raises(CorruptRecord):
                store.complete(key, token, PAYLOAD, keep=KEEP)
            with pytest.raises(CorruptRecord):
                store.release(key, token)
            with pytest.raises(CorruptRecord):
                store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE)
        case 2:
            with pytest.raises(CorruptRecord):
                store.quarantine(key, token, "lost")
            clock.advance(LEASE)
            with pytest.raises(CorruptRecord):
                store.claim(a_request(key), token=a_token(), lease=LEASE)
            assert redis_client.zcard(keys[1]) == 1
        case 3:
            with pytest.raises(CorruptRecord):
                store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE)
            assert redis_client.zcard(keys[1]) == 1

    assert redis_client.dump(keys[0]) == before
    assert len(redis_client.keys("*:r:*")) == 1


@for_each(
    "floor",
    (
        "high",
        "",
        "nan",
        "-nan",
        "inf",
        "1e300",
        "1e3",
        "0x1F",
        "-1",
        "1.5",
        " 1",
        "1 ",
        "1\n",
        "9" * 400,
        "9007199254740991",
        "9007199254740992",
        "9007199254740993",
    ),
)
def test_a_partition_with_an_unreadable_floor_grants_no_claim(
    store: RedisStore, redis_client: redis.Redis, floor: str
) -> None:
    """A fence that might be an old one, or the same as the next, is worse than none."""
    redis_client.flushdb()
    key = a_key()
    partition = layout.keys(key)[3]
    redis_client.hset(partition, "fence", floor)

    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert redis_client.keys() == [partition]
    assert redis_client.hget(partition, "fence") == floor.encode()


def test_the_highest_floor_still_gives_a_fence(store: RedisStore, redis_client: redis.Redis) -> None:
    key = a_key()
    redis_client.hset(layout.keys(key)[3], "fence", str(2**53 - 2))

    assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence == 2**53 - 1
    with pytest.raises(CorruptRecord):
        store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE)


def test_a_record_with_too_high_a_fence_is_not_taken_over(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """The successor's fence would not be above it."""
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    record = layout.keys(key)[0]
    redis_client.setrange(record, 17, b"\xff" * 7)
    before = redis_client.get(record)

    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert redis_client.get(record) == before


@for_each("spoilt", (lambda data: data[:-1] + b"\xff", lambda data: data[:-3]), ids=("no text", "cut short"))
def test_a_reason_that_cannot_be_read_is_corrupt(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, spoilt: Callable[[bytes], bytes]
) -> None:
    key = a_key()
    stand(store, clock, key, "quarantined")
    record = layout.keys(key)[0]
    stored = redis_client.get(record)
    assert isinstance(stored, bytes)
    redis_client.set(record, spoilt(stored))

    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)
    with pytest.raises(CorruptRecord):
        store.read(key)


@for_each("counted", (False, True))
def test_no_flipped_bit_runs_a_payment_again(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, counted: bool
) -> None:
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota() if counted else None))
    clock.advance(1.5)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    record = layout.keys(key)[0]
    stored = redis_client.get(record)
    assert isinstance(stored, bytes)
    seen = Counter[str]()

    for bit in range(len(stored) * 8):
        data = bytearray(stored)
        data[bit // 8] ^= 1 << bit % 8
        redis_client.set(record, bytes(data), px=100_000)
        seen[said(store, key)] += 1
        with pytest.raises((LeaseLost, CorruptRecord)):
            store.release(key, token)
        seen[said(store, key)] += 1

    assert set(seen) == {"Record", "Mismatched", "CorruptRecord", "Unknown"}


def said(store: RedisStore, key: StorageKey) -> str:
    try:
        return type(store.claim(a_request(key), token=a_token(), lease=LEASE)).__name__
    except CorruptRecord as error:
        return type(error).__name__


def test_a_response_that_expired_before_completion_stays_for_ever(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key = a_key()
    stand(store, clock, key, "completed")
    keys = layout.keys(key)
    completed_ms = round(clock.now * 1000)
    redis_client.setrange(keys[0], 48, (completed_ms - 1).to_bytes(6, "big"))
    for _ in range(2):
        with pytest.raises(CorruptRecord):
            store.claim(a_request(key), token=a_token(), lease=LEASE)
        with pytest.raises(CorruptRecord):
            store.read(key)
        clock.advance(100 * 86_400)

    assert (redis_client.pttl(keys[0]), redis_client.zcard(keys[2])) == (-1, 1)
    redis_client.setrange(keys[0], 48, completed_ms.to_bytes(6, "big"))
    assert store.read(key) is None
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


@for_each("counted", (False, True))
def test_a_clock_set_back_makes_no_response_expire_early(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, counted: bool
) -> None:
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota() if counted else None))
    clock.advance(-86_400)
    store.complete(key, token, PAYLOAD, keep=1)
    assert said(store, key) == "Record"
    clock.advance(86_400.5)

    assert said(store, key) == "Record"
    assert redis_client.pttl(layout.keys(key)[0]) > 86_400_000
    assert Drift() == store.ledger.reconcile(key.tid)


def test_a_response_that_redis_still_keeps_has_not_expired(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    """A deadline may lose a bit hours after it was written, and be in the past and still after the completion."""
    store, key, token = redis_store(redis_server.url), a_key(), a_token()
    record = layout.keys(key)[0]
    try:
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        now = redis_client.time()[0]
        redis_client.setrange(
            record, 42, ((now - 7200) * 1000).to_bytes(6, "big") + ((now - 1) * 1000).to_bytes(6, "big")
        )
        before = redis_client.get(record)
        assert (said(store, key), said(store, key)) == ("CorruptRecord", "CorruptRecord")
        assert redis_client.get(record) == before
        redis_client.pexpire(record, 60_000)

        assert said(store, key) == "Grant"
    finally:
        store.close()


def refused(store: RedisStore, key: StorageKey, token: bytes) -> None:
    for write in WRITES.values():
        with pytest.raises(CorruptRecord):
            write(store, key, token)
    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=token, lease=LEASE)
    with pytest.raises(CorruptRecord):
        store.read(key)


QUOTA = Quota(records=100, bytes=10**6, in_flight=10, new_keys=NewKeys(100, 60))
ODD = (b"", b"-1", b"nan", b"1e300", b"9" * 17, b"9" * 5000, b"\xff\xfe")
ERRORS = (CorruptRecord, LeaseLost, StoreUnavailable)


@pytest.mark.parametrize("standing", ("in flight", "completed", "quarantined"))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_record_is_never_granted_and_never_called_an_outage(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Standing, data: st.DataObject
) -> None:
    """
    An outage would be one more run where `on_store_down` is "allow". A life that was shortened ends, and that is all.
    """
    key = a_key()
    token = stand(store, clock, key, standing)
    record = layout.keys(key)[0]
    stored: Any = redis_client.get(record)
    deadline = int.from_bytes(stored[48:54], "big")
    changed = data.draw(damaged(stored))
    redis_client.set(record, changed)

    claimed = outcome(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE), ERRORS)
    for ask in (
        lambda: store.renew(key, token, lease=LEASE),
        lambda: store.mark_point_of_no_return(key, token),
        lambda: store.complete(key, token, StoredPayload(b"x", 200, True, 1), keep=KEEP),
        lambda: store.quarantine(key, token, "lost"),
        lambda: store.release(key, token),
        lambda: store.read(key),
        lambda: store.responses.scan(limit=10),
    ):
        assert not isinstance(outcome(ask, ERRORS), StoreUnavailable)

    assert not isinstance(claimed, StoreUnavailable)
    shortened = int.from_bytes(changed[48:54], "big") < deadline
    released = standing == "completed" or changed[:1] != stored[:1] or shortened
    assert not isinstance(claimed, Grant) or released


PLACES = [(place, odd) for place in ("memory", "ledger", "data keys", "notes", "lock") for odd in ODD]
PLACES += [(index, odd) for index in ("in flight", "quarantined", "unsettled") for odd in ODD[::3]]
"""Where something odd stands. In an index it is the name of an entry, beside five odd scores."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "odd"),
    PLACES,
    ids=lambda each: each if isinstance(each, str) else each[:9].decode("latin-1") or "nothing",
)
def test_damage_outside_records_raises_only_our_errors(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, place: str, odd: bytes
) -> None:
    key, token = a_key(), a_token()
    shelf = store.data_keys.read_keys(key.tid)
    assert store.data_keys.add(key.tid, DataKey(1, "k", b"wrapped"), store=shelf.store, after=shelf.last)
    store.data_keys.disable(key.tid, 1)
    assert store.data_keys.add(key.tid, DataKey(2, "k", b"wrapped"), store=shelf.store, after=1)
    store.ledger.limit(key.tid, QUOTA)
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=QUOTA))
    store.complete(key, token, StoredPayload(b"\x10bytes", 201, True, 300, SealedBy("k", 2)), keep=KEEP)
    stand(store, clock, a_key(tid=key.tid), "in flight")
    stand(store, clock, a_key(tid=key.tid), "quarantined")
    store.task_log.report("heartbeat", '{"skew_ms": 1}')
    store.task_log.lock("reap", a_token(), lease=1)
    keys = layout.keys(key)
    name = {
        "memory": keys[3],
        "ledger": keys[5],
        "data keys": keys[6],
        "notes": layout.TASKS,
        "lock": layout.task_lock("reap"),
        "in flight": keys[1],
        "quarantined": keys[2],
        "unsettled": keys[4],
    }[place]
    for change in changes(redis_client, name, odd):
        before: Any = redis_client.dump(name)
        change()
        asked = questions(store, clock, key, limit=1) | {"data loss": lambda: store.data_loss.status()}
        found = {name: outcome(ask, ERRORS) for name, ask in asked.items()}
        again = outcome(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE), ERRORS)
        new = outcome(
            lambda: store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE, quota=QUOTA), ERRORS
        )

        assert not isinstance(again, Grant | StoreDataLoss), (change, found)
        assert not isinstance(again, StoreUnavailable)
        assert not isinstance(new, StoreUnavailable) or isinstance(new, StoreDataLoss), (place, odd, new)
        if before is not None:
            redis_client.restore(name, 0, before, replace=True)


def changes(client: redis.Redis, name: bytes, odd: bytes) -> list[Callable[[], object]]:
    """Each thing that can be done to a key of this type with this value."""
    kind = client.type(name)
    if kind == b"hash":
        fields: Any = client.hkeys(name)
        named = [partial(client.hset, name, odd or b"odd", b"1"), partial(client.hset, name, b"b" + odd, b"1 1")]
        return [*(partial(client.hset, name, field, odd) for field in fields), *named]
    if kind == b"zset":
        scores = (float("inf"), float("-inf"), 1.5, -1.0, 2.0**60)
        return [partial(client.zadd, name, {odd: score, odd + b"2": score}) for score in scores]
    return [partial(client.set, name, odd)]


def test_pages_end_with_any_index_scores(store: RedisStore, redis_client: redis.Redis) -> None:
    """
    Between two whole scores there may be many, and names in an order of their own: each page goes on behind the last.
    """
    index = layout.keys(a_key())[1]
    names = [b"%c" % letter for letter in b"zyxwvuts"]
    odd = [float("inf"), float("-inf"), 2.0**60]
    redis_client.zadd(
        index, {name: 1 + at / 10 for at, name in enumerate(names)} | {b"odd%d" % n: s for n, s in enumerate(odd)}
    )
    seen, after, pages = Index(store._server, lambda partition: layout.indexes_in(partition)[0]), b"", 0
    while pages < 20:
        _, following = seen.page(after=after, limit=1)
        pages += 1
        if following is None:
            break
        after = following

    assert following is None
    assert pages <= len(names) + 2
