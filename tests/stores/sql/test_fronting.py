"""A database knows that a cache of its answers stands before it, and tells hosts that know no cache."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import select

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.sql.schema import meta
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.tiered import TieredStore
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import OpenStore
from tests.stores.sql.counting import sent


def since(store: SqlStore) -> list[int]:
    statement = select(meta.c.value).where(meta.c.name == "cached_since")
    return list(store.database.run(lambda connection: connection.scalars(statement).all()))


def test_a_cache_is_remembered_since_when_it_was_first_noted(open_store: OpenStore, clock: FrozenClock) -> None:
    """By every host, and also when two note it at once: of the second nothing is left."""
    store, other = open_store(clock=clock), open_store(clock=clock)
    assert not store.has_cache()
    first = round(clock.now * 1_000_000)
    store.note_cache()
    clock.advance(60)
    other.has_cache = lambda: False  # type: ignore[method-assign]
    other.note_cache()

    assert store.has_cache()
    assert [first] == since(store)


def test_a_process_notes_its_cache_once_and_writes_only_where_nobody_has(
    open_store: OpenStore, clock: FrozenClock, redis_server: RedisServer
) -> None:
    """Before its first claim, so before anything is cached: one statement more than to learn which database it is."""
    noted: list[list[str]] = []
    for _ in range(2):
        system, cache = open_store(clock=clock), RedisReplayCache(redis_server.url, clock=clock)
        store = TieredStore(system, cache)
        with sent(system) as statements:
            for _ in range(2):
                granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
        noted.append(statements)
        cache.close()

    first, second = noted
    assert Counter([*second, "INSERT INTO"]) == Counter(first)
    assert 1 == second.count("SELECT count(*)")
