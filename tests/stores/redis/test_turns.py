"""Whose turn it is to be asked about, over all partitions of a Redis."""

from __future__ import annotations

import pytest
import redis

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, State, Unknown
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted, stand
from tests.stores.unsettled import in_partition, keys, stale

LEAST, MOST = 10.0, 100.0


def due(store: RedisStore, *, limit: int = 10, horizon: float = 1e10) -> list[StorageKey]:
    return [each.key for each in store.recovery.next_for_resolver(horizon=horizon, least=LEAST, most=MOST, limit=limit)]


def turn(client: redis.Redis, key: StorageKey) -> float | None:
    """In seconds."""
    names = layout.keys(key)
    score = client.zscore(names[2], layout.name(names))
    assert score is None or isinstance(score, float)
    return None if score is None else score / 1000


def test_the_one_that_has_waited_longest_comes_first(store: RedisStore, clock: FrozenClock) -> None:
    """Of all partitions, however many of them have some, and however many one has."""
    made = list[StorageKey]()
    for partition in (900, 3, 900, 900, 500, 3, 1023):
        made.append(in_partition(partition))
        stand(store, clock, made[-1], "quarantined")
        clock.advance(1)

    assert made[:2] == due(store, limit=2)
    assert made[2:5] == due(store, limit=3)
    assert made[5:] == due(store, limit=3)
    assert due(store) == []


def test_the_run_that_ends_a_lease_asks_as_well(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """It goes by when it began, and what it quarantines it does later."""
    key = a_key()
    stand(store, clock, key, "lapsed, quarantine")
    began = clock.now
    clock.advance(5)
    (sheet,) = stale(store, horizon=began)
    assert store.recovery.quarantine_expired(sheet.found[0], horizon=began)

    assert turn(redis_client, key) == sheet.found[0].record.deadline
    assert [key] == due(store, horizon=began)


def test_a_condemned_answer_has_its_turn_at_once(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Its deadline is the end of the answer's life, which may be in three months."""
    key = a_key()
    stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)

    assert turn(redis_client, key) == clock.now
    assert [key] == due(store, horizon=clock.now)
    assert turn(redis_client, key) == clock.now + LEAST


def test_the_next_turn_stands_in_the_index(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """As long from now as the key has been quarantined for, within bounds."""
    key = a_key()
    stand(store, clock, key, "quarantined")
    for age, pause in ((0, LEAST), (LEASE + 5, LEAST), (20, 25), (50, 75), (100, MOST), (1e6, MOST)):
        clock.advance(age)
        assert [key] == due(store, horizon=clock.now)
        assert turn(redis_client, key) == clock.now + pause


def test_what_cannot_be_read_keeps_nobody_waiting(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """It would be the first in the queue for ever. It stays as it is, and comes up again after the longest pause."""
    spoilt = [a_key() for _ in range(5)]
    for key in spoilt:
        stand(store, clock, key, "quarantined")
        redis_client.set(layout.keys(key)[0], "not a record")
    clock.advance(1)
    good = [a_key() for _ in range(2)]
    for key in good:
        stand(store, clock, key, "quarantined")

    assert set(good) == set(due(store, limit=2))
    assert {turn(redis_client, key) for key in spoilt} == {clock.now + MOST}
    assert {redis_client.get(layout.keys(key)[0]) for key in spoilt} == {b"not a record"}


def test_a_claim_that_meets_what_cannot_be_read_gives_it_a_turn(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """It is nobody's to settle, and stays counted among the quarantined."""
    key = a_key()
    stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)
    assert [key] == due(store)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert turn(redis_client, key) == clock.now + LEAST


@pytest.mark.parametrize("verb", ("complete", "release", "renew"))
def test_the_owner_may_settle_whatever_the_turn(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, verb: str
) -> None:
    """
    That it stands at another place in the index is nothing to its owner: it leaves it as if it had never been asked about.
    """
    key = a_key()
    token = stand(store, clock, key, "quarantined")
    assert [key] == due(store)
    match verb:
        case "complete":
            store.complete(key, token, PAYLOAD, keep=KEEP)
        case "release":
            store.release(key, token)
        case _:
            store.renew(key, token, lease=LEASE)

    assert (turn(redis_client, key) is None) == (verb != "renew")


def test_turns_are_no_drift(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """Whoever recounts a tenant does not look at when it is to be asked about."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.quarantine(key, token, "view-crashed")
    clock.advance(1000)
    assert [key] == due(store)
    drift = store.ledger.reconcile(key.tid)

    assert drift.none
    assert turn(redis_client, key) == clock.now + MOST
    assert [key] == [each.key for each in store.recovery.scan(State.QUARANTINED, limit=10).found]
    assert keys([store.recovery.expired_leases(horizon=1e10, limit=10)]) == []
