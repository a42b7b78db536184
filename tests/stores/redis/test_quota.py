"""Quota counters in Redis: their size, their writes, and their recount."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.model import MAX_LIMIT, OnExpiry, OverQuota
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.connection import RETRIES
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
)
from tests.forgiving import redis_store
from tests.stores.counted import PLENTY, SHUT, claim, complete, everything, fields


def test_a_quota_hash_has_one_field_per_bucket(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    tid, day = a_key().tid, 86_400.0
    for _ in range(3 * 24 * 6):
        complete(store, tid, keep=day, payload=replace(PAYLOAD, byte_size=2**40 - 1))
        clock.advance(600)

    kept = fields(redis_client, tid, b"b")
    redis_client.hset(layout.tenant_quota(tid), mapping=dict.fromkeys(kept, b"99999 99999999999999"))
    redis_client.hset(layout.tenant_quota(tid), "t", "9999999 999999999999999 1795186930040")
    for seconds in (1, 30, 60, 3600, 86_400):
        claim(store, tid, Quota(new_keys=NewKeys(10**6, seconds)))
    usage = redis_client.memory_usage(layout.tenant_quota(tid))
    assert 32 <= len(kept) <= 66
    assert usage is not None
    assert usage < 4096


@for_each(
    "quota",
    (*SHUT, Quota(new_keys=NewKeys(0, 30))),
    ids=("records", "bytes", "in flight", "new keys", "another window"),
)
def test_a_refused_claim_writes_no_data(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, quota: Quota
) -> None:
    """Not a byte, though buckets have ended that could be swept: a tenant that is over its limit costs reads alone."""
    tid = a_key().tid
    complete(store, tid, keep=10)
    complete(store, tid)
    claim(store, tid)
    clock.advance(60)
    before = everything(redis_client)

    assert isinstance(store.claim(a_request(a_key(tid=tid)), token=a_token(), lease=LEASE, quota=quota), OverQuota)
    assert everything(redis_client) == before


def test_an_uncounted_claim_writes_no_quota(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    for on_expiry in OnExpiry:
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE))
        store.renew(key, token, lease=2 * LEASE)
        clock.advance(3 * LEASE)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    store.mark_corrupt(key, PAYLOAD)

    assert redis_client.keys("*:[fq]:*") == []


def test_a_claim_after_a_long_pause_clears_old_buckets_once(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    tid = a_key().tid
    for _ in range(70):
        complete(store, tid)
        clock.advance(KEEP / 32)
    clock.advance(30 * 86_400)
    assert Usage() == replace(store.ledger.usage(tid), new_keys=0)
    claim(store, tid)

    assert fields(redis_client, tid, b"b") == {}
    assert redis_client.hget(layout.tenant_quota(tid), "t") == b"0 0 0"
    assert Usage(1, 0, 1) == replace(store.ledger.usage(tid), new_keys=0)


def test_past_rate_windows_are_dropped(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    tid = a_key().tid
    clock.advance(86_400 - clock.now % 86_400)
    lengths = 7, 30, 86_400
    for seconds in lengths:
        for _ in range(2):
            claim(store, tid, Quota(new_keys=NewKeys(2, seconds)))
    names = {seconds: b"w%d000000" % seconds for seconds in (*lengths, 60)}
    assert {names[seconds] for seconds in lengths} == set(fields(redis_client, tid, b"w"))
    redis_client.hset(layout.tenant_quota(tid), "w", "of another release")
    clock.advance(10)
    complete(store, tid, keep=1)
    assert {names[seconds] for seconds in (30, 60, 86_400)} == set(fields(redis_client, tid, b"w"))
    clock.advance(55)
    claim(store, tid)

    assert {names[seconds] for seconds in (60, 86_400)} == set(fields(redis_client, tid, b"w"))
    full = Quota(new_keys=NewKeys(2, 86_400))
    assert isinstance(store.claim(a_request(a_key(tid=tid)), token=a_token(), lease=LEASE, quota=full), OverQuota)
    assert store.ledger.usage(tid).new_keys == 2


@for_each("text", ("", "1", "x y", "1 2 3", "-1 5"))
def test_an_unreadable_rate_window_starts_again(store: RedisStore, redis_client: redis.Redis, text: str) -> None:
    """It would end by itself, and until then it would shut the tenant out."""
    tid = a_key().tid
    redis_client.hset(layout.tenant_quota(tid), "w60000000", text)
    claim(store, tid)

    assert store.ledger.usage(tid).new_keys == 1


@for_each(
    "damaged",
    (
        ("t", "1 2"),
        ("t", "x y z"),
        ("t", "9" * 30 + " 0 0"),
        ("b1", "1"),
        ("b1", "1 2 3"),
        ("w60000000", "x y"),
        ("j", "-1"),
    ),
)
def test_damaged_counts_are_no_usage(store: RedisStore, redis_client: redis.Redis, damaged: tuple[str, str]) -> None:
    tid = a_key().tid
    redis_client.hset(layout.tenant_quota(tid), *damaged)

    with pytest.raises(CorruptRecord):
        store.ledger.usage(tid)


@for_each("counts", (f"{'9' * 400} 0", f"0 {'9' * 400}"), ids=("records", "bytes"))
def test_counts_that_no_number_holds_are_no_usage(store: RedisStore, redis_client: redis.Redis, counts: str) -> None:
    tid = a_key().tid
    redis_client.hset(layout.tenant_quota(tid), mapping={"t": f"{counts} 1", "b1": counts})

    with pytest.raises(CorruptRecord):
        store.ledger.usage(tid)


def test_a_claim_reads_all_quota_fields_only_after_a_bucket_ends(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    tid = a_key().tid
    for _ in range(20):
        complete(store, tid)
        clock.advance(KEEP / 32)
    redis_client.config_resetstat()
    claim(store, tid)

    commands: Any = redis_client.info("commandstats")
    assert "cmdstat_hgetall" not in commands
    # Of the ledger, and of what the partition remembers.
    assert commands["cmdstat_hmget"]["calls"] == 2


@for_each("lost", ("claim", "complete", "release"))
def test_a_call_repeated_after_a_lost_reply_counts_once(
    redis_server: RedisServer, clock: FrozenClock, lost: str
) -> None:
    with TcpProxy(redis_server.port) as proxy:
        store = redis_store(f"redis://127.0.0.1:{proxy.port}/0", clock=clock)
        tid, token, calls = a_key().tid, a_token(), list[Any]()
        key = a_key(tid=tid)
        complete(store, tid)
        calls.append(lambda: store.claim(a_request(key), token=token, lease=LEASE, quota=PLENTY))
        if lost != "claim":
            calls.pop()()
            write = store.release if lost == "release" else None
            calls.append(lambda: write(key, token) if write else store.complete(key, token, PAYLOAD, keep=KEEP))
        for _ in range(1 + RETRIES):
            proxy.lose_reply()
        with pytest.raises(StoreUnavailable):
            calls[0]()
        proxy.lose_reply()
        calls[0]()
        usage = store.ledger.usage(tid)
        store.close()

    size = PAYLOAD.byte_size
    expected = {"claim": Usage(2, size, 1, 2), "complete": Usage(2, 2 * size, 0, 2), "release": Usage(1, size, 0, 2)}
    assert expected[lost] == usage


def test_a_full_server_counts_writes_of_owners(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    store, client = full
    tid = a_key().tid
    complete(store, tid, keep=1)
    condemned = complete(store, tid)
    made = [claim(store, tid) for _ in range(4)]
    clock.advance(10)
    client.config_set("maxmemory", 1)
    before = everything(client)
    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key(tid=tid)), token=a_token(), lease=LEASE, quota=PLENTY)
    assert everything(client) == before
    store.complete(*made[0], PAYLOAD, keep=KEEP)
    store.release(*made[1])
    store.quarantine(*made[2], "why")
    store.renew(*made[3], lease=3 * LEASE)
    store.mark_corrupt(condemned, PAYLOAD)
    clock.advance(LEASE)

    assert Usage(4, PAYLOAD.byte_size, 1) == replace(store.ledger.usage(tid), new_keys=0)
    assert Drift() == store.ledger.reconcile(tid)


@for_each("which", (4, 5), ids=("unsettled", "ledger"))
def test_a_quota_key_of_another_type_stops_before_the_first_write(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, which: int
) -> None:
    """A script that stopped half-way would leave a record in an index and not, or counted and not."""
    tid = a_key().tid
    (key, token), done = claim(store, tid), complete(store, tid)
    lapsed, _ = claim(store, tid, on_expiry=OnExpiry.TAKEOVER)
    clock.advance(LEASE)
    name = layout.keys(key)[which]
    redis_client.delete(name)
    redis_client.lpush(name, "not ours")
    before = everything(redis_client)
    calls: list[Any] = [
        lambda: store.claim(a_request(a_key(tid=tid)), token=a_token(), lease=LEASE, quota=PLENTY),
        lambda: store.complete(key, token, PAYLOAD, keep=KEEP),
        lambda: store.mark_corrupt(done, PAYLOAD),
        lambda: store.ledger.usage(tid),
    ]
    if which == 4:
        calls += [
            lambda: store.renew(key, token, lease=9 * LEASE),
            lambda: store.quarantine(key, token, "why"),
            lambda: store.release(key, token),
            lambda: store.claim(a_request(lapsed), token=a_token(), lease=LEASE),
        ]

    for call in calls:
        with pytest.raises(CorruptRecord):
            call()
    assert everything(redis_client) == before


@for_each("text", ("", "nan nan nan", "1 1", "-1 0 0", "1e3 0 0", "0x1 0 0", "many", "1 1 1 1"))
def test_unreadable_totals_grant_no_claim_and_are_repaired(
    store: RedisStore, redis_client: redis.Redis, text: str
) -> None:
    tid = a_key().tid
    complete(store, tid)
    key, token = claim(store, tid)
    redis_client.hset(layout.tenant_quota(tid), "t", text)

    with pytest.raises(CorruptRecord):
        claim(store, tid)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    with pytest.raises(CorruptRecord):
        claim(store, tid)
    store.ledger.reconcile(tid)
    assert Usage(2, 2 * PAYLOAD.byte_size) == replace(store.ledger.usage(tid), new_keys=0)


@for_each("text", ("", "1", "nan,,,,,", "-1,,,,,", ",,,1,,", ",,,1,0,0", ",,,1,-1,1", "a,b,c,d,e,f"))
def test_unreadable_limits_grant_no_claim(store: RedisStore, redis_client: redis.Redis, text: str) -> None:
    tid = a_key().tid
    redis_client.hset(layout.tenant_quota(tid), "l", text)
    with pytest.raises(CorruptRecord):
        claim(store, tid)
    store.ledger.limit(tid, Quota(records=1))

    claim(store, tid)


def test_a_limit_may_be_very_high(store: RedisStore) -> None:
    limit = MAX_LIMIT
    tid, quota = a_key().tid, Quota(limit, limit, limit, NewKeys(limit, 1e-9))
    claim(store, tid, quota)
    store.ledger.limit(tid, quota)

    claim(store, tid)
    assert quota == store.ledger.limits(tid)


def test_very_large_sums_stay_numbers(store: RedisStore, redis_client: redis.Redis) -> None:
    """A codec that says that an answer has an exabyte neither stops the script nor makes a ledger unreadable."""
    tid = a_key().tid
    for size in (2**62, 2**200):
        complete(store, tid, payload=replace(PAYLOAD, byte_size=size))

    assert store.ledger.usage(tid).records == 2
    assert isinstance(
        store.claim(a_request(a_key(tid=tid)), token=a_token(), lease=LEASE, quota=Quota(bytes=10**9)), OverQuota
    )
    assert Drift() == store.ledger.reconcile(tid)


def test_a_recount_finds_records_deleted_by_hand(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
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


def test_a_recount_restores_lost_quota(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    tid = a_key().tid
    complete(store, tid)
    claim(store, tid)
    key, token = claim(store, tid)
    store.quarantine(key, token, "why")
    usage = replace(store.ledger.usage(tid), new_keys=0)
    redis_client.delete(layout.tenant_quota(tid), layout.tenant_unfinished(tid))

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


def test_a_recount_leaves_concurrent_changes_alone(
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


def test_a_recount_counts_a_record_scanned_twice_once(
    redis_server: RedisServer, store: RedisStore, clock: FrozenClock
) -> None:
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


def test_an_unreadable_record_stays_counted(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    tid = a_key().tid
    key, _ = claim(store, tid)
    redis_client.set(layout.keys(key)[0], b"rubbish")

    assert Drift() == store.ledger.reconcile(tid)
    assert store.ledger.usage(tid).records == 1
