"""A status must say what a claim would find, after any loss of data, and must leave every byte of Redis as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, Record, Unknown
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, a_key, a_request, a_token, found, stand
from tests.stores.forgetting import ANOTHER, HOLD, RULES, Loss, claim, emptying, handing_over, ready_store

__all__ = ["emptying", "handing_over", "ready_store"]

Happening = Callable[[RedisStore, "Losses", FrozenClock], None]


class Losses:
    """The two ways in which a Redis loses its data."""

    def __init__(self, hand_over: Loss, empty: Loss) -> None:
        self.hand_over = hand_over
        self.empty = empty


@pytest.fixture
def losses(hand_over: Loss, empty: Loss) -> Losses:
    return Losses(hand_over, empty)


def nothing(store: RedisStore, losses: Losses, clock: FrozenClock) -> None: ...


def handed_over(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    losses.hand_over()


def emptied(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    losses.empty()


def noticed(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    losses.hand_over()
    store.data_loss.status()


def held_long_enough(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    noticed(store, losses, clock)
    clock.advance(HOLD + 1)


def acknowledged(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    losses.hand_over()
    store.data_loss.acknowledge(forced=True)


def emptied_and_acknowledged(store: RedisStore, losses: Losses, clock: FrozenClock) -> None:
    losses.empty()
    store.data_loss.acknowledge(forced=True)


HAPPENINGS = (nothing, handed_over, emptied, noticed, held_long_enough, acknowledged, emptied_and_acknowledged)

SETTINGS = {
    "refuse": RULES,
    "hold": replace(RULES, after_loss="hold"),
    "run": replace(RULES, after_loss="run"),
    "another store": replace(RULES, store_id="another"),
    "no times of keys": replace(RULES, clock_skew=None),
}


@pytest.fixture
def writes(redis_client: redis.Redis) -> Callable[[], int]:
    """How many writes the server has made."""
    return lambda: int(redis_client.info("persistence")["rdb_changes_since_last_save"])


def foretold(store: RedisStore, key: StorageKey, **asked: Any) -> Any:
    """What the method says: a kind of loss, or whether a claim runs."""
    record = store.read(key)
    try:
        return store.data_loss.would_run(key, record=record, **asked)
    except StoreDataLoss as error:
        return "noticed" if error.noticed else error.loss


def claimed(store: RedisStore, key: StorageKey, **asked: Any) -> Any:
    """What becomes of a claim."""
    try:
        outcome = claim(store, key, **asked)
    except StoreDataLoss as error:
        return error.loss
    assert isinstance(outcome, Grant | Unknown)
    return isinstance(outcome, Grant)


@pytest.fixture(params=SETTINGS)
def judge(request: pytest.FixtureRequest, redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisStore]:
    """A store under other settings, on the Redis of `store`."""
    with closing(RedisStore(redis_server.url, clock=clock, rules=SETTINGS[request.param])) as store:
        yield store


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_it_foretells_each_claim_and_writes_nothing(
    store: RedisStore,
    judge: RedisStore,
    losses: Losses,
    clock: FrozenClock,
    writes: Callable[[], int],
    happening: Happening,
) -> None:
    old, recent = a_key(), a_key()
    stand(store, clock, old, "lapsed, takeover")
    happening(store, losses, clock)
    clock.advance(1)
    keys = [(old, None), *((a_key(), made) for made in (None, clock.now - 3600, clock.now + 3600))]
    if happening in (nothing, acknowledged, emptied_and_acknowledged):
        stand(store, clock, recent, "lapsed, takeover")
        keys.append((recent, None))
    for key, made in keys:
        clock.now = max(clock.now, made or 0.0)
        before = writes()
        said = foretold(judge, key, key_timestamp=made)

        assert before == writes()
        assert said == claimed(judge, key, key_timestamp=made)


def test_it_knows_a_redis_that_was_never_initialised(redis_server: RedisServer, clock: FrozenClock) -> None:
    with closing(RedisStore(redis_server.url, clock=clock, rules=RedisDataLossPolicy())) as store:
        assert "missing" == foretold(store, a_key())
        assert "missing" == claimed(store, a_key())


def test_an_expired_response_is_unknown_after_a_loss(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    key = a_key()
    stand(store, clock, key, "completed")
    hand_over()
    clock.advance(10 * 86_400)

    assert store.read(key) is None
    assert "changed" == foretold(store, key)


def doubt(client: redis.Redis, key: StorageKey) -> None:
    """As after a restart of a Redis that wrote each change to its file, before any process has looked at it."""
    facts: Any = {**ANOTHER, b"lossless": ANOTHER[b"process"]}
    client.hset(layout.facts_in(layout.number(key.tid)), mapping=facts)


def test_a_restart_that_may_have_lost_nothing_is_judged_once(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one case in which a status makes the store look at its server, as a claim would. The record stays as it is."""
    key, judged = a_key(), list[int]()
    stand(store, clock, key, "lapsed, takeover")
    doubt(redis_client, key)
    record, judge = redis_client.get(layout.keys(key)[0]), store.data_loss.judge

    def note() -> None:
        judged.append(1)
        judge()

    monkeypatch.setattr(store.data_loss, "judge", note)

    said = foretold(store, key)

    assert [1] == judged
    assert record == redis_client.get(layout.keys(key)[0])
    assert said == claimed(store, key)


def test_a_restart_that_cannot_be_judged_is_a_loss(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, unknown = a_key(), a_key()
    stand(store, clock, known, "lapsed, takeover")
    for key in (known, unknown):
        doubt(redis_client, key)
    monkeypatch.setattr(store.data_loss, "judge", lambda: None)

    assert ["changed"] * 4 == [each(store, key) for key in (known, unknown) for each in (foretold, claimed)]


def test_the_record_of_a_claim_before_the_loss_is_not_taken_over(
    store: RedisStore, clock: FrozenClock, hand_over: Loss
) -> None:
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    assert store.data_loss.would_run(key, record=found(store, key))
    hand_over()

    record: Record = found(store, key)
    assert record.remaining < 0 < LEASE
    assert not store.data_loss.would_run(key, record=record)


def test_a_redis_that_may_evict_records_is_not_asked(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a claim: the record of a key that was used may be gone, and no loss of data shows."""
    monkeypatch.setattr(store._eviction, "possible", True)
    monkeypatch.setattr(store._eviction, "_evicting_policy", lambda: "allkeys-lru")
    for each in (foretold, claimed, voided):
        with pytest.raises(StoreUnavailable, match="evicts"):
            each(store, a_key())

    store._eviction.possible = False
    for each in (foretold, claimed, voided):
        each(store, a_key())


def voided(store: RedisStore, key: StorageKey) -> object:
    return store.void(a_request(key), token=a_token(), keep=KEEP)
