"""Unfinished records, their order for resolvers, and the task log in Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, OnExpiry, State, Unknown
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin import data_keys
from flask_idempotency.stores.redis.admin.janitor import FREED_MS, PARTITIONS_AT_ONCE, RECORDS_AT_ONCE, Index, in_flight
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor
from flask_idempotency.stores.redis.scripts import Script
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
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis
from tests.stores.counted import complete, fields
from tests.stores.unsettled import in_partition, indexed, keys, lapsed, seen, sheets, stale, walked

UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:40],
    "a newer format": lambda data: bytes([data[0] | 0xE0]) + data[1:],
}


@pytest.mark.parametrize("limit", (1, 2, 5, 1000))
def test_expired_leases_are_found_in_every_partition(store: RedisStore, clock: FrozenClock, limit: int) -> None:
    """
    The first and the last, and on both sides of where one round trip ends. Nothing is met twice, and no sheet is longer.
    """
    places = (0, PARTITIONS_AT_ONCE - 1, PARTITIONS_AT_ONCE, 500, layout.PARTITIONS - 1)
    made = [in_partition(place) for place in places for _ in range(3)]
    lapsed(store, clock, *made)
    met = stale(store, limit=limit)

    assert sorted(made, key=lambda key: key.rid) == sorted(keys(met), key=lambda key: key.rid)
    assert max(len(sheet.found) for sheet in met) <= limit


def test_more_records_than_one_script_reads_are_all_found(store: RedisStore, clock: FrozenClock) -> None:
    tid = a_key().tid
    made = {a_key(tid=tid) for _ in range(2 * RECORDS_AT_ONCE + 1)}
    lapsed(store, clock, *made)

    (sheet,) = stale(store)
    assert made == {each.key for each in sheet.found}
    assert made == set(keys(stale(store, limit=RECORDS_AT_ONCE)))


@pytest.mark.parametrize("state", (State.PROCESSING, State.QUARANTINED))
def test_a_record_that_leaves_the_index_hides_no_other(store: RedisStore, clock: FrozenClock, state: State) -> None:
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


@pytest.mark.parametrize("limit", (1, 3, 5, 10))
@pytest.mark.parametrize("page", (0, 1))
def test_an_entry_that_comes_during_a_page_hides_no_other(
    store: RedisStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, limit: int, page: int
) -> None:
    """It may come between the count and the read, and before entries that stay. None of them is left out."""
    execute_all, server, pages, last = ScriptExecutor.execute_all, store._server, 0, 2

    def late(self: ScriptExecutor, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if pages == page and any("ZRANGEBYSCORE" in command for command in commands):
            redis_client.zadd(in_flight(7), {b"late %d" % at: last for at in range(2)})
        return execute_all(self, commands)

    stay = {b"%d" % score: score for score in range(3, 9)}
    redis_client.zadd(in_flight(7), stay)
    redis_client.zadd(in_flight(8), {b"other": 1})
    monkeypatch.setattr(ScriptExecutor, "execute_all", late)
    met, after = list[bytes](), b""
    while True:
        entries, following = Index(server, in_flight).page(after=after, limit=limit)
        met += [entry.name for entry in entries]
        assert len(entries) <= limit
        if following is None:
            break
        after, pages, last = following, pages + 1, entries[-1].score

    assert [] == sorted({*stay, b"other"} - set(met))
    assert len(met) == len(set(met))


def test_an_entry_whose_record_is_gone_is_dropped(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
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


def test_an_entry_in_the_wrong_index_is_corrected(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Also on a Redis that is full: what is lost from both is asked about no more."""
    held, flying, answered = a_key(), a_key(), a_key()
    stand(store, clock, held, "quarantined")
    stand(store, clock, flying, "in flight")
    stand(store, clock, answered, "completed")
    every = [layout.keys(key) for key in (held, flying, answered)]
    # All are deleted first, because two of these tenants may share a partition and its indexes.
    redis_client.delete(*(index for names in every for index in names[1:3]))
    for names in every:
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
def test_an_unreadable_record_stays_and_is_skipped(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Any, spoilt: str
) -> None:
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


def test_a_count_runs_no_script_where_there_is_nothing(
    store: RedisStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console counts every few seconds, and a script in each partition took a third of a second."""
    for place in (3, 700):
        stand(store, clock, in_partition(place), "in flight")
    stand(store, clock, in_partition(900), "quarantined")
    asked: list[Any] = []
    run_all = ScriptExecutor.run_all

    def noted(self: ScriptExecutor, script: Script, calls: Sequence[Call]) -> list[Any]:
        asked.extend((script.name, call.keys[0]) for call in calls)
        return run_all(self, script, calls)

    monkeypatch.setattr(ScriptExecutor, "run_all", noted)

    assert UnfinishedCounts(in_flight=2, quarantined=1, quarantined_for=0.0) == store.recovery.counts()
    assert [("count_unfinished", layout.indexes_in(place)[0]) for place in (3, 700)] == asked[:2]
    assert ["oldest_quarantined"] == [name for name, _ in asked[2:]]


def test_an_index_of_another_type_is_corrupt(store: RedisStore, redis_client: redis.Redis) -> None:
    """Nobody can tell what is in flight there: a run that passed it over would look as if all were well."""
    redis_client.set(layout.indexes_in(700)[0], "not ours")

    with pytest.raises(CorruptRecord):
        stale(store)
    with pytest.raises(CorruptRecord):
        store.recovery.counts()


def test_a_scan_does_not_read_response_bodies(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    answered, damaged = a_key(), a_key()
    for key in (answered, damaged):
        stand(store, clock, key, "completed")
    store.mark_corrupt(damaged, PAYLOAD)

    for state, key in ((State.COMPLETED, answered), (State.QUARANTINED, damaged)):
        (each,) = store.recovery.scan(state, limit=10).found
        assert each.record.payload is not None
        told = each.key, each.record.payload.status, each.record.payload.byte_size, each.record.payload.data
        assert told == (key, PAYLOAD.status, PAYLOAD.byte_size, b"")


def test_release_and_resolve_remove_the_index_entries(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    freed, settled = a_key(), a_key()
    for key in (freed, settled):
        stand(store, clock, key, "quarantined")
    assert store.recovery.force_release(seen(store, freed))
    assert store.recovery.resolve(seen(store, settled), token=a_token(), payload=PAYLOAD, keep=KEEP)

    assert [[False, False]] * 2 == [indexed(redis_client, key) for key in (freed, settled)]
    assert not redis_client.exists(layout.keys(freed)[0])
    assert (KEEP + 55) * 1000 < redis_client.pttl(layout.keys(settled)[0]) <= (KEEP + 60) * 1000


def test_the_janitor_reads_only_indexes(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
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


@pytest.mark.parametrize("quota", (None, Quota(records=1000)), ids=("not counted", "counted"))
def test_the_janitor_works_on_a_full_server(
    full: tuple[RedisStore, redis.Redis], clock: FrozenClock, quota: Quota | None
) -> None:
    store, client = full
    tid = a_key().tid
    for on_expiry in (OnExpiry.QUARANTINE,) * 3 + (OnExpiry.TAKEOVER,):
        granted(store.claim(a_request(a_key(tid=tid), on_expiry=on_expiry), token=a_token(), lease=LEASE, quota=quota))
    answered, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(answered), token=token, lease=LEASE, quota=quota))
    store.complete(answered, token, PAYLOAD, keep=KEEP)
    clock.advance(LEASE)
    client.config_set("maxmemory", 1)

    (sheet,) = stale(store)
    assert [True] * 3 + [False] == sorted(
        (store.recovery.quarantine_expired(each, horizon=clock.now) for each in sheet.found), reverse=True
    )
    first, second, third = store.recovery.next_for_resolver(horizon=clock.now, least=1, most=1, limit=10)
    assert store.recovery.resolve(first, token=a_token(), payload=PAYLOAD, keep=KEEP)
    assert store.recovery.force_release(second)
    assert store.recovery.force_release(seen(store, answered))
    assert (1, 1) == (store.recovery.counts().lapsed, store.recovery.counts().quarantined)
    if quota is not None:
        client.config_set("maxmemory", 0)
        assert (Usage(3, PAYLOAD.byte_size, 0), Drift()) == (store.ledger.usage(tid), store.ledger.reconcile(tid))
    assert State.QUARANTINED is found(store, third.key).state


def test_a_full_server_still_repairs_its_indexes(full: tuple[RedisStore, redis.Redis], clock: FrozenClock) -> None:
    store, client = full
    held = a_key()
    stand(store, clock, held, "quarantined")
    names = layout.keys(held)
    client.zadd(names[1], {layout.name(names): 0})
    client.delete(names[2])
    client.config_set("maxmemory", 1)

    assert keys(stale(store)) == []
    assert [False, True] == indexed(client, held)


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "completed"))
@pytest.mark.parametrize("again", (False, True), ids=("free", "in flight again"))
def test_a_repeated_force_release_reports_success(
    full: tuple[RedisStore, redis.Redis],
    clock: FrozenClock,
    monkeypatch: pytest.MonkeyPatch,
    standing: Any,
    again: bool,
) -> None:
    store, client = full
    key, call = a_key(), a_token()
    stand(store, clock, key, standing)
    before = seen(store, key)
    monkeypatch.setattr("flask_idempotency.stores.redis.admin.janitor.new_token", lambda: call)
    client.config_set("maxmemory", 1)
    assert store.recovery.force_release(before)
    client.config_set("maxmemory", 0)
    if again:
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    after = store.read(key)

    assert store.recovery.force_release(before)
    monkeypatch.undo()
    assert not store.recovery.force_release(before)
    assert after == store.read(key)
    assert 0 < client.pttl(layout.freed(key)) <= FREED_MS


def test_a_dead_server_is_unavailable(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind)
    store, key = redis_store(server.url), a_key()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    before = seen(store, key)
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")
    with pytest.raises(StoreUnavailable):
        store.recovery.force_release(before)
    server.kill()

    calls: tuple[Callable[[], object], ...] = (
        lambda: stale(store),
        lambda: store.recovery.quarantine_expired(before, horizon=1e10),
        lambda: store.recovery.next_for_resolver(horizon=1e10, least=1, most=1, limit=1),
        lambda: store.recovery.resolve(before, token=a_token(), payload=PAYLOAD, keep=KEEP),
        lambda: store.recovery.force_release(before),
        lambda: store.recovery.scan(State.QUARANTINED, limit=1),
        store.recovery.counts,
        store.task_log.now,
        store.health.findings,
    )
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    store.close()


LEAST, MOST = 10.0, 100.0


def due(store: RedisStore, *, limit: int = 10, horizon: float = 1e10) -> list[StorageKey]:
    return [each.key for each in store.recovery.next_for_resolver(horizon=horizon, least=LEAST, most=MOST, limit=limit)]


def turn(client: redis.Redis, key: StorageKey) -> float | None:
    """In seconds."""
    names = layout.keys(key)
    score = client.zscore(names[2], layout.name(names))
    assert score is None or isinstance(score, float)
    return None if score is None else score / 1000


def test_the_record_that_waits_longest_comes_first(store: RedisStore, clock: FrozenClock) -> None:
    made = list[StorageKey]()
    for partition in (900, 3, 900, 900, 500, 3, 1023):
        made.append(in_partition(partition))
        stand(store, clock, made[-1], "quarantined")
        clock.advance(1)

    assert made[:2] == due(store, limit=2)
    assert made[2:5] == due(store, limit=3)
    assert made[5:] == due(store, limit=3)
    assert due(store) == []


def test_a_run_that_quarantines_a_record_returns_it_too(
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


def test_an_unreadable_record_does_not_block_the_queue(
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


def test_a_claim_on_an_unreadable_record_queues_it_for_the_resolver(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key = a_key()
    stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)
    assert [key] == due(store)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert turn(redis_client, key) == clock.now + LEAST


def test_resolver_times_are_no_quota_drift(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
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


def test_a_task_lock_expires(store: RedisStore, redis_client: redis.Redis) -> None:
    token = a_token()
    for lease in (60, 30):
        assert store.task_log.lock("reap", token, lease=lease)
        assert (lease - 5) * 1000 < redis_client.pttl(layout.task_lock("reap")) <= lease * 1000


def test_task_reports_do_not_expire(store: RedisStore, redis_client: redis.Redis) -> None:
    store.task_log.report("reap", "{}")

    assert redis_client.ttl(layout.TASKS) == -1


def test_the_task_log_is_in_one_slot(store: RedisStore, redis_client: redis.Redis) -> None:
    store.task_log.report("reap", "{}")
    assert store.task_log.lock("reap", a_token(), lease=60)
    names = set(redis_client.scan_iter())

    assert names == {b"idm1:{tasks}:n", b"idm1:{tasks}:l:reap"}
    assert store.ledger.tenants() == ()
    assert store.responses.scan(limit=1000).answers == ()


def test_the_task_log_works_on_a_full_server(full: tuple[RedisStore, redis.Redis]) -> None:
    (store, client), token = full, a_token()
    client.config_set("maxmemory", 1)
    assert store.task_log.lock("reap", token, lease=60)
    store.task_log.report("reap", "{}")
    assert not store.task_log.lock("reap", a_token(), lease=60)
    store.task_log.unlock("reap", token)

    assert store.task_log.lock("reap", a_token(), lease=60)
    assert store.task_log.reports()["reap"].report == "{}"


def test_a_foreign_value_does_not_hold_a_task_lock(store: RedisStore, redis_client: redis.Redis) -> None:
    redis_client.set(layout.task_lock("reap"), "not ours")
    store.task_log.unlock("reap", a_token())
    assert redis_client.get(layout.task_lock("reap")) == b"not ours"

    assert store.task_log.lock("reap", a_token(), lease=60)
    assert not store.task_log.lock("reap", a_token(), lease=60)


def test_an_unreadable_task_report_is_corrupt(store: RedisStore, redis_client: redis.Redis) -> None:
    redis_client.set(layout.TASKS, "not ours")
    with pytest.raises(CorruptRecord):
        store.task_log.report("reap", "{}")
    with pytest.raises(CorruptRecord):
        store.task_log.reports()
    redis_client.delete(layout.TASKS)
    redis_client.hset(layout.TASKS, "reap", "not a time")
    with pytest.raises(CorruptRecord):
        store.task_log.reports()


def test_the_task_log_uses_the_server_time(redis_client: redis.Redis) -> None:
    store = redis_store(redis_client)
    before, after = redis_client.time(), store.task_log.now()
    seconds, micros = redis_client.time()

    assert before[0] + before[1] / 1_000_000 <= after <= seconds + micros / 1_000_000


def test_a_recount_clears_the_buckets_of_idle_tenants(
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


def test_a_page_of_a_tenant_passes_over_many_records_of_others(
    store: RedisStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a list of a small tenant would take a page for every few records of the others. A page stops in time."""
    mine, other = a_key(), a_key()
    for key in (mine, other):
        complete(store, key.tid)
    record = redis_client.get(next(iter(redis_client.scan_iter(layout.every(b"r", other.tid)))))
    pipeline = redis_client.pipeline(transaction=False)
    for _ in range(3000):
        pipeline.set(layout.keys(a_key(tid=other.tid))[0], record or b"")
    pipeline.execute()

    def pages() -> list[int]:
        sizes = list[int]()
        after: bytes | None = b""
        while after is not None:
            page = store.recovery.scan(State.COMPLETED, after=after, limit=10, tid=mine.tid)
            sizes.append(len(page.found))
            after = page.after
        return sizes

    assert [1] == [size for size in pages() if size]
    assert 1 <= len(pages()) <= 2
    monkeypatch.setattr(data_keys, "MOST_KEYS", 1000)
    assert 2 <= len(pages()) <= 5
