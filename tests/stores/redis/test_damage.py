"""Whatever stands under a key of ours in Redis, a caller is told of damage, and work that was done is granted to nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, SealedBy, State, StoredPayload
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.janitor import Index
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, Standing, a_key, a_request, a_token, granted, stand
from flask_idempotency.testing.doubles import FrozenClock
from tests.damage import damaged

QUOTA = Quota(records=100, bytes=10**6, in_flight=10, new_keys=NewKeys(100, 60))
ODD = (b"", b"-1", b"nan", b"1e300", b"9" * 17, b"9" * 5000, b"\xff\xfe")


def told(ask: Callable[[], object]) -> object:
    """What this was answered. Fails for an exception that is none of the library's."""
    try:
        return ask()
    except (CorruptRecord, LeaseLost, StoreUnavailable) as error:
        return error


def everything(store: RedisStore, clock: FrozenClock, key: StorageKey) -> dict[str, object]:
    """What each who looks at this store is told."""
    asks: dict[str, Callable[[], object]] = {
        "read": lambda: store.read(key),
        "answers": lambda: store.responses.scan(limit=100),
        "count": lambda: store.responses.count(),
        "walk": lambda: [store.recovery.scan(state, limit=1) for state in State],
        "stale": lambda: store.recovery.expired_leases(horizon=clock.now + 10 * LEASE, limit=1),
        "due": lambda: store.recovery.next_for_resolver(horizon=clock.now, least=1, most=10, limit=1),
        "standing": lambda: store.recovery.counts(),
        "usage": lambda: store.ledger.usage(key.tid),
        "limits": lambda: store.ledger.limits(key.tid),
        "tenants": lambda: store.ledger.tenants(),
        "reconcile": lambda: store.ledger.reconcile(key.tid),
        "shelf": lambda: store.data_keys.read_keys(key.tid),
        "others": lambda: store.data_keys.wrapped_by_other("new"),
        "key count": lambda: store.data_keys.count(),
        "chores": lambda: store.task_log.reports(),
        "take": lambda: store.task_log.lock("reap", b"t" * 16, lease=60),
        "memory": lambda: store.data_loss.status(),
    }
    return {name: told(ask) for name, ask in asks.items()}


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

    outcome = told(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE))
    for ask in (
        lambda: store.renew(key, token, lease=LEASE),
        lambda: store.mark_point_of_no_return(key, token),
        lambda: store.complete(key, token, StoredPayload(b"x", 200, True, 1), keep=KEEP),
        lambda: store.quarantine(key, token, "lost"),
        lambda: store.release(key, token),
        lambda: store.read(key),
        lambda: store.responses.scan(limit=10),
    ):
        assert not isinstance(told(ask), StoreUnavailable)

    assert not isinstance(outcome, StoreUnavailable)
    shortened = int.from_bytes(changed[48:54], "big") < deadline
    released = standing == "completed" or changed[:1] != stored[:1] or shortened
    assert not isinstance(outcome, Claimed) or released


PLACES = ("memory", "ledger", "data keys", "notes", "lock", "in flight", "quarantined", "unsettled")


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:9].decode("latin-1") or "nothing")
@pytest.mark.parametrize("place", PLACES)
def test_what_is_damaged_beside_the_records_raises_nothing_of_pythons(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, place: str, odd: bytes
) -> None:
    """Field by field, and entry by entry. Each who looks comes to an end, and a completed key replays or is damage."""
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
        "notes": layout.NOTES,
        "lock": layout.lock("reap"),
        "in flight": keys[1],
        "quarantined": keys[2],
        "unsettled": keys[4],
    }[place]
    for change in changes(redis_client, name, odd):
        before: Any = redis_client.dump(name)
        change()
        found = everything(store, clock, key)
        again = told(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE))
        new = told(lambda: store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE, quota=QUOTA))

        assert not isinstance(again, Claimed | StoreDataLoss), (change, found)
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


def test_pages_come_to_their_end_whatever_the_scores_are(store: RedisStore, redis_client: redis.Redis) -> None:
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
