"""The book of chores in a Redis, and why nothing is swept there."""

from __future__ import annotations

import pytest
import redis

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, a_key, a_token
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.stores.counted import complete, fields


def test_a_lock_ends_by_itself(store: RedisStore, redis_client: redis.Redis) -> None:
    """Where nobody ever takes that chore again; and so does one that was taken again."""
    token = a_token()
    for lease in (60, 30):
        assert store.task_log.lock("reap", token, lease=lease)
        assert (lease - 5) * 1000 < redis_client.pttl(layout.task_lock("reap")) <= lease * 1000


def test_the_notes_do_not_end(store: RedisStore, redis_client: redis.Redis) -> None:
    """That nobody has come for a year is what they are for."""
    store.task_log.report("reap", "{}")

    assert redis_client.ttl(layout.TASKS) == -1


def test_the_book_is_in_one_slot(store: RedisStore, redis_client: redis.Redis) -> None:
    """Beside the records, and in none of their partitions."""
    store.task_log.report("reap", "{}")
    assert store.task_log.lock("reap", a_token(), lease=60)
    names = set(redis_client.scan_iter())

    assert names == {b"idm1:{tasks}:n", b"idm1:{tasks}:l:reap"}
    assert store.ledger.tenants() == ()
    assert store.responses.scan(limit=1000).answers == ()


def test_a_full_server_keeps_the_book(start_redis: StartRedis, redis_kind: str, clock: FrozenClock) -> None:
    """That it is full is no reason to believe that nobody comes, or that nobody may."""
    server, token = start_redis(redis_kind), a_token()
    store = redis_store(server.url, clock=clock)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        assert store.task_log.lock("reap", token, lease=60)
        store.task_log.report("reap", "{}")
        assert not store.task_log.lock("reap", a_token(), lease=60)
        store.task_log.unlock("reap", token)
        assert store.task_log.lock("reap", a_token(), lease=60)

    assert store.task_log.reports()["reap"].report == "{}"
    store.close()


def test_what_is_no_lock_holds_nobody(store: RedisStore, redis_client: redis.Redis) -> None:
    """Somebody's text in its place: who comes next takes it, and giving back what is not one's own changes nothing."""
    redis_client.set(layout.task_lock("reap"), "not ours")
    store.task_log.unlock("reap", a_token())
    assert redis_client.get(layout.task_lock("reap")) == b"not ours"

    assert store.task_log.lock("reap", a_token(), lease=60)
    assert not store.task_log.lock("reap", a_token(), lease=60)


def test_what_is_no_note_is_told(store: RedisStore, redis_client: redis.Redis) -> None:
    """Of another type, or without a time: nobody can tell when the janitor was there."""
    redis_client.set(layout.TASKS, "not ours")
    with pytest.raises(CorruptRecord):
        store.task_log.report("reap", "{}")
    with pytest.raises(CorruptRecord):
        store.task_log.reports()
    redis_client.delete(layout.TASKS)
    redis_client.hset(layout.TASKS, "reap", "not a time")
    with pytest.raises(CorruptRecord):
        store.task_log.reports()


def test_the_time_is_the_servers(redis_client: redis.Redis) -> None:
    """Wherever no test says otherwise."""
    store = redis_store(redis_client)
    before, after = redis_client.time(), store.task_log.now()
    seconds, micros = redis_client.time()

    assert before[0] + before[1] / 1_000_000 <= after <= seconds + micros / 1_000_000


def test_recounting_clears_the_buckets_of_the_idle(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """There is nothing to sweep: a tenant that never comes back is cleared by `reconcile`, and keeps one line."""
    tid = a_key().tid
    for _ in range(5):
        complete(store, tid)
        clock.advance(KEEP)
    clock.advance(KEEP)
    assert len(fields(redis_client, tid, b"b")) > 0
    assert store.expiry.sweep(horizon=clock.now, limit=1000) == 0
    assert store.ledger.reconcile(tid).none

    assert fields(redis_client, tid, b"b") == {}
    assert fields(redis_client, tid, b"t") == {b"t": b"0 0 0"}
