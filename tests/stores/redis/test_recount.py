"""Ledgers in Redis: what a recount mends, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, PAYLOAD, a_key
from tests.forgiving import redis_store
from tests.stores.counted import claim, complete


def test_what_was_deleted_by_hand_is_found_by_a_recount(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Said once, and right from then on. Other tenants of the partition are none of it."""
    tid = a_key().tid
    neighbour = tid[:2] + a_key().tid[2:]
    for each in (tid, neighbour):
        for _ in range(3):
            complete(store, each)
        claim(store, each)
    gone, flying = complete(store, tid), claim(store, tid)[0]
    redis_client.delete(layout.keys(gone)[0], layout.keys(flying)[0])

    assert Drift(records=1, bytes=PAYLOAD.byte_size, unsettled=1) == store.ledger.reconcile(tid)
    assert (Drift(), Drift()) == (store.ledger.reconcile(tid), store.ledger.reconcile(neighbour))
    for each in (tid, neighbour):
        assert Usage(4, 3 * PAYLOAD.byte_size, 1) == replace(store.ledger.usage(each), new_keys=0)


def test_a_ledger_that_was_lost_is_made_again(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """
    From the records: all that it said can be counted again, but for the window of new keys and an operator's limits.
    """
    tid = a_key().tid
    complete(store, tid)
    claim(store, tid)
    key, token = claim(store, tid)
    store.quarantine(key, token, "why")
    usage = replace(store.ledger.usage(tid), new_keys=0)
    redis_client.delete(layout.ledger(tid), layout.unsettled(tid))

    assert Drift(-1, -PAYLOAD.byte_size, -2) == store.ledger.reconcile(tid)
    assert usage == store.ledger.usage(tid)


class Busy(redis.Redis):
    """Does something of its own before each script of this name."""

    before: Any = None

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "EVALSHA" and self.before is not None and args[1] == scripts.QUOTA_RECOUNT.sha:
            meanwhile, self.before = self.before, None
            meanwhile()
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def test_what_changes_during_a_recount_is_left_alone(
    redis_server: RedisServer, store: RedisStore, clock: FrozenClock
) -> None:
    """
    A bucket that others have filled meanwhile was counted too early or too late, and so is said to be busy. Claims that
    come and go are counted right, whenever they do.
    """
    tid = a_key().tid
    key, token = claim(store, tid)
    complete(store, tid)

    def meanwhile() -> None:
        store.complete(key, token, PAYLOAD, keep=KEEP)
        claim(store, tid)

    with Busy.from_url(redis_server.url) as client:
        client.before = meanwhile
        drift = redis_store(client, clock=clock).ledger.reconcile(tid)

    assert (True, 1) == (drift.none, drift.busy)
    assert Usage(3, 2 * PAYLOAD.byte_size, 1) == replace(store.ledger.usage(tid), new_keys=0)
    assert Drift(busy=0) == store.ledger.reconcile(tid)


def test_a_recount_is_right_beyond_one_batch(store: RedisStore, clock: FrozenClock) -> None:
    """SCAN tells some keys twice while its tables grow, and never all at once."""
    tid = a_key().tid
    for _ in range(1300):
        complete(store, tid)

    assert Drift() == store.ledger.reconcile(tid)
    assert store.ledger.usage(tid).records == 1300


class Twice(redis.Redis):
    """Tells every key twice, as SCAN may while a table grows: on one page, and on one more at the end."""

    met: tuple[bytes, ...] = ()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] != "SCAN":
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if int(args[1]) == 7:
            return 0, list(self.met)
        _, keys = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        self.met = tuple(keys)
        return 7, keys + keys


def test_what_is_met_twice_counts_once(redis_server: RedisServer, store: RedisStore, clock: FrozenClock) -> None:
    """A recount that counted it twice would raise the ledger, and shut a tenant out."""
    tid = a_key().tid
    for _ in range(5):
        complete(store, tid)
    with Twice.from_url(redis_server.url) as client:
        twice = redis_store(client, clock=clock)

        assert (Drift(), {"": 5}, (tid,)) == (
            twice.ledger.reconcile(tid),
            twice.responses.count(),
            twice.ledger.tenants(),
        )


def test_a_record_that_nobody_can_read_stays_counted(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """It is there until somebody has settled it."""
    tid = a_key().tid
    key, _ = claim(store, tid)
    redis_client.set(layout.keys(key)[0], b"rubbish")

    assert Drift() == store.ledger.reconcile(tid)
    assert store.ledger.usage(tid).records == 1
