"""Unsettled records by their indexes: over all partitions, and however damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.janitor import PARTITIONS_AT_ONCE, RECORDS_AT_ONCE
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
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
from tests.stores.unsettled import in_partition, indexed, keys, lapsed, seen, sheets, stale, walked

UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:40],
    "a newer format": lambda data: bytes([data[0] | 0xE0]) + data[1:],
}


@pytest.mark.parametrize("limit", (1, 2, 5, 1000))
def test_every_partition_is_looked_at(store: RedisStore, clock: FrozenClock, limit: int) -> None:
    """
    The first and the last, and on both sides of where one round trip ends. Nothing is met twice, and no sheet is longer.
    """
    places = (0, PARTITIONS_AT_ONCE - 1, PARTITIONS_AT_ONCE, 500, layout.PARTITIONS - 1)
    made = [in_partition(place) for place in places for _ in range(3)]
    lapsed(store, clock, *made)
    met = stale(store, limit=limit)

    assert sorted(made, key=lambda key: key.rid) == sorted(keys(met), key=lambda key: key.rid)
    assert max(len(sheet.found) for sheet in met) <= limit


def test_more_than_one_script_looks_at_are_all_met(store: RedisStore, clock: FrozenClock) -> None:
    """Of one tenant, whose leases ended in one moment."""
    tid = a_key().tid
    made = {a_key(tid=tid) for _ in range(2 * RECORDS_AT_ONCE + 1)}
    lapsed(store, clock, *made)

    (sheet,) = stale(store)
    assert made == {each.key for each in sheet.found}
    assert made == set(keys(stale(store, limit=RECORDS_AT_ONCE)))


@pytest.mark.parametrize("state", (State.PROCESSING, State.QUARANTINED))
def test_who_leaves_or_moves_makes_no_other_missed(store: RedisStore, clock: FrozenClock, state: State) -> None:
    """A place is behind a score and a name, and not so many from the beginning."""
    tid = a_key().tid
    owners = {a_key(tid=tid): a_token() for _ in range(12)}
    for at, (key, token) in enumerate(owners.items()):
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        clock.advance(at % 2)
        if state is State.QUARANTINED:
            store.quarantine(key, token, "view-crashed")
    leaving, met = list(owners)[::3], set[StorageKey]()
    for sheet in sheets(lambda after: store.recovery.scan(state, after=after, limit=2)):
        met |= {each.key for each in sheet.found}
        # What was met goes, so that all the others are nearer to the beginning by one.
        for each in sheet.found[:1]:
            if each.key in leaving:
                assert store.recovery.force_release(each)
        store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=1)

    assert owners.keys() == met


def test_an_entry_whose_record_is_gone_is_dropped(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """By whoever meets it; nobody can look for a lapsed record in vain for ever."""
    gone, left = a_key(), a_key()
    lapsed(store, clock, gone, left)
    redis_client.delete(layout.keys(gone)[0])

    assert [left] == keys(stale(store))
    assert ([False, False], [True, False]) == (indexed(redis_client, gone), indexed(redis_client, left))
    held = a_key()
    stand(store, clock, held, "quarantined")
    redis_client.delete(layout.keys(held)[0])
    assert store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10) == []
    assert [False, False] == indexed(redis_client, held)


def test_an_entry_in_the_wrong_index_is_put_right(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Also on a Redis that is full: what is lost from both is asked about no more."""
    held, flying, answered = a_key(), a_key(), a_key()
    stand(store, clock, held, "quarantined")
    stand(store, clock, flying, "in flight")
    stand(store, clock, answered, "completed")
    for key in (held, flying, answered):
        names = layout.keys(key)
        redis_client.delete(*names[1:3])
        for index in names[1:3]:
            redis_client.zadd(index, {layout.name(names): 0})
    redis_client.zrem(layout.keys(held)[2], layout.name(layout.keys(held)))
    redis_client.zrem(layout.keys(flying)[1], layout.name(layout.keys(flying)))

    # Each walk mends the one index and is met with by the other.
    for _ in range(2):
        in_flight, quarantined = (walked(store, state) for state in (State.PROCESSING, State.QUARANTINED))
    assert ([flying], [held]) == (in_flight, quarantined)
    assert [True, False] == indexed(redis_client, flying)
    assert [False, True] == indexed(redis_client, held)
    assert [False, False] == indexed(redis_client, answered)
    assert found(store, flying).deadline * 1000 == redis_client.zscore(
        layout.keys(flying)[1], layout.name(layout.keys(flying))
    )


@pytest.mark.parametrize("spoilt", (*UNREADABLE, "of another type"))
@pytest.mark.parametrize("standing", ("lapsed, quarantine", "quarantined"))
def test_what_cannot_be_read_stays_and_is_left_out(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Any, spoilt: str
) -> None:
    """Byte for byte, in its index, and counted: only a person can say what it was."""
    key = a_key()
    stand(store, clock, key, standing)
    name = layout.keys(key)[0]
    data = redis_client.get(name)
    assert isinstance(data, bytes)
    if spoilt in UNREADABLE:
        redis_client.set(name, UNREADABLE[spoilt](data))
    else:
        redis_client.delete(name)
        redis_client.lpush(name, data)
    before = redis_client.dump(name), indexed(redis_client, key)

    assert keys(stale(store)) == []
    for state in State:
        assert walked(store, state) == []
    assert store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10) == []
    standing_now = store.recovery.counts()
    assert standing_now.lapsed + standing_now.quarantined == 1
    assert before == (redis_client.dump(name), indexed(redis_client, key))


def test_an_index_of_another_type_is_told(store: RedisStore, redis_client: redis.Redis) -> None:
    """Nobody can tell what is in flight there: a run that passed it over would look as if all were well."""
    redis_client.set(layout.indexes_in(700)[0], "not ours")

    with pytest.raises(CorruptRecord):
        stale(store)
    with pytest.raises(CorruptRecord):
        store.recovery.counts()


def test_a_long_answer_is_not_read(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """
    Of what is walked through: who it is about and what it was, and not a byte of a condemned or a completed answer.
    """
    answered, damaged = a_key(), a_key()
    for key in (answered, damaged):
        stand(store, clock, key, "completed")
    store.mark_corrupt(damaged, PAYLOAD)

    for state, key in ((State.COMPLETED, answered), (State.QUARANTINED, damaged)):
        (each,) = store.recovery.scan(state, limit=10).found
        assert each.record.payload is not None
        told = each.key, each.record.payload.status, each.record.payload.byte_size, each.record.payload.data
        assert told == (key, PAYLOAD.status, PAYLOAD.byte_size, b"")


def test_what_others_settle_leaves_no_trace(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """In no index, and an answer by another's hand has a time to live."""
    freed, settled = a_key(), a_key()
    for key in (freed, settled):
        stand(store, clock, key, "quarantined")
    assert store.recovery.force_release(seen(store, freed))
    assert store.recovery.resolve(seen(store, settled), token=a_token(), payload=PAYLOAD, keep=KEEP)

    assert [[False, False]] * 2 == [indexed(redis_client, key) for key in (freed, settled)]
    assert not redis_client.exists(layout.keys(freed)[0])
    assert (KEEP + 55) * 1000 < redis_client.pttl(layout.keys(settled)[0]) <= (KEEP + 60) * 1000


def test_nothing_is_looked_through(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """However many answers there are: no key is asked for but by an index, and the empty ones cost a count each."""
    for _ in range(20):
        stand(store, clock, a_key(), "completed")
    redis_client.config_resetstat()
    assert keys(stale(store)) == []
    assert store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10) == []
    calls: dict[str, Any] = redis_client.info("commandstats")

    assert {name: calls.get(f"cmdstat_{name}") for name in ("scan", "keys", "get", "getrange")} == {
        "scan": None,
        "keys": None,
        "get": None,
        "getrange": None,
    }
    assert (layout.PARTITIONS, layout.PARTITIONS) == (
        calls["cmdstat_zcount"]["calls"],
        calls["cmdstat_zrangebyscore"]["calls"],
    )
