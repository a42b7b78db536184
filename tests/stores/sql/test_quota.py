"""Quotas are exact under concurrency, cost the documented statements, and keep tenants apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, func, select, text, update

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, OverQuota, Record
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores import bucket_edge_ms, bucket_width_ms
from flask_idempotency.stores.sql import quota as ledger_statements
from flask_idempotency.stores.sql.admin.data_keys import SqlResponses
from flask_idempotency.stores.sql.completion import SHARDS
from flask_idempotency.stores.sql.database import Database, TenantLock
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL
from flask_idempotency.stores.sql.quota import MARGIN, within
from flask_idempotency.stores.sql.schema import RESPONSES, quota_buckets, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.stores.sql.conftest import MakeEngine, OpenStore, by_every_lock, by_every_strategy, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent

THREADS, LIMIT = 32, 100
ROOM = Quota(records=1_000_000, bytes=10**12, in_flight=1_000_000, new_keys=NewKeys(1_000_000, 60))
FULL = Quota(records=1)

EVERY_LIMIT = {
    "records": Quota(records=LIMIT),
    "in flight": Quota(in_flight=LIMIT),
    "new keys": Quota(new_keys=NewKeys(LIMIT, 60)),
}

LOOK, STANDING = "SELECT idempotency_records.state,", "SELECT limits.now,"
CLOSELY = ["SELECT pg_advisory_xact_lock(%(my_tenants_number)s::BIGINT)", "WITH limits"]


def ask(store: SqlStore, tid: bytes, quota: Quota | None, *, key: StorageKey | None = None) -> StoreOutcome:
    return store.claim(a_request(key or a_key(tid=tid)), token=a_token(), lease=LEASE, quota=quota)


def ask_until_told(store: SqlStore, tid: bytes, quota: Quota) -> StoreOutcome:
    """As clients do: on a slow machine thirty of them wait for one lock for longer than our patience."""
    key, token = a_key(tid=tid), a_token()
    for _ in range(9):
        with suppress(StoreUnavailable):
            return store.claim(a_request(key), token=token, lease=LEASE, quota=quota)
    raise AssertionError("nobody was ever told")


def complete(store: SqlStore, tid: bytes, quota: Quota | None = ROOM) -> StorageKey:
    key, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    return key


def asked_by_many(stores: list[SqlStore], tid: bytes, quota: Quota, *, each: int) -> list[StoreOutcome]:
    def work(store: SqlStore) -> list[StoreOutcome]:
        return [ask_until_told(store, tid, quota) for _ in range(each)]

    def asker(store: SqlStore) -> Callable[[], list[StoreOutcome]]:
        return lambda: work(store)

    outcomes = at_once(*(asker(stores[number % len(stores)]) for number in range(THREADS)))
    return [outcome for some in outcomes for outcome in some]


@pytest.mark.slow
@by_every_strategy
@pytest.mark.parametrize("limit", list(EVERY_LIMIT))
def test_never_more_than_the_limit_and_never_less(open_store: OpenStore, strategy: str, limit: str) -> None:
    """Of thirty-two threads in three stores, who all look before anybody has written."""
    tid = a_key().tid
    stores = [open_store(strategy=strategy) for _ in range(3)]
    each = 5 if strategy == "insert" else 4

    outcomes = asked_by_many(stores, tid, EVERY_LIMIT[limit], each=each)

    kinds = [type(outcome) for outcome in outcomes]
    assert (LIMIT, THREADS * each - LIMIT) == (kinds.count(Grant), kinds.count(OverQuota))
    assert LIMIT == stores[0].ledger.usage(tid).in_flight


@pytest.mark.slow
@by_every_lock
def test_a_limit_is_exact_where_the_margin_begins(open_store: OpenStore, strategy: str) -> None:
    """The first ones are let in from afar and the last ones one at a time, all at once."""
    tid, limit = a_key().tid, MARGIN + 60
    stores = [open_store(strategy=strategy) for _ in range(3)]

    outcomes = asked_by_many(stores, tid, Quota(records=limit), each=8)

    assert limit == sum(isinstance(outcome, Grant) for outcome in outcomes) == stores[0].ledger.usage(tid).records


@by_every_strategy
def test_several_strategies_keep_one_limit(open_store: OpenStore, strategy: str) -> None:
    tid = a_key().tid
    stores = [open_store(strategy=strategy), open_store()]

    outcomes = asked_by_many(stores, tid, Quota(records=20), each=2)

    assert 20 == sum(isinstance(outcome, Grant) for outcome in outcomes)


@on_postgresql
@pytest.mark.parametrize(("quota", "statements"), ((ROOM, [LOOK, "WITH limits"]), (None, ["WITH granted"])))
def test_a_new_key_far_from_every_limit_waits_for_no_lock(
    open_store: OpenStore, quota: Quota | None, statements: list[str]
) -> None:
    """It takes one statement more than without a quota, so that a replay does not pay for the planning of this one."""
    store, tid = open_store(), a_key().tid
    ask(store, tid, quota)

    with sent(store) as seen:
        granted(ask(store, tid, quota))

    assert statements == seen


@on_postgresql
def test_a_new_key_near_a_limit_is_a_short_transaction(open_store: OpenStore) -> None:
    """Where no limit is reached yet, it is looked at once more under the tenant's lock."""
    store, tid = open_store(), a_key().tid
    ask(store, tid, ROOM)

    with sent(store) as seen:
        granted(ask(store, tid, Quota(records=MARGIN + 1)))

    assert [LOOK, "WITH limits", STANDING, *CLOSELY] == seen


@on_postgresql
def test_a_limit_below_the_margin_is_always_near(open_store: OpenStore) -> None:
    store, tid = open_store(), a_key().tid
    ask(store, tid, None)

    with sent(store) as seen:
        granted(ask(store, tid, Quota(in_flight=MARGIN)))

    assert [LOOK, STANDING, *CLOSELY] == seen


@on_postgresql
def test_a_refusal_takes_one_more_statement_and_no_lock(open_store: OpenStore) -> None:
    store, tid = open_store(), a_key().tid
    ask(store, tid, FULL)

    with sent(store) as seen:
        assert isinstance(ask(store, tid, FULL), OverQuota)

    assert [LOOK, STANDING] == seen


@on_sqlite
@pytest.mark.parametrize(
    ("quota", "more"),
    (
        (None, []),
        (Quota(records=9), [LOOK, "SELECT limits.now,"]),
        (Quota(new_keys=NewKeys(9, 60)), [LOOK, "SELECT limits.now,", "INSERT INTO"]),
    ),
)
def test_on_sqlite_a_new_key_is_counted_under_the_one_lock(
    open_store: OpenStore, quota: Quota | None, more: list[str]
) -> None:
    """Which is exact without anything else."""
    store, tid = open_store(), a_key().tid
    ask(store, tid, None)

    with sent(store) as seen:
        granted(ask(store, tid, quota))

    assert [LOOK, "BEGIN IMMEDIATE", *more, "INSERT INTO", "INSERT INTO", "COMMIT"] == seen


@by_every_strategy
@pytest.mark.parametrize("quota", (None, ROOM, FULL))
def test_a_known_key_takes_no_more_statements(open_store: OpenStore, strategy: str, quota: Quota | None) -> None:
    store, tid = open_store(strategy=strategy), a_key().tid
    key = complete(store, tid)
    with sent(store) as without:
        assert isinstance(ask(store, tid, None, key=key), Record)

    with sent(store) as seen:
        assert isinstance(ask(store, tid, quota, key=key), Record)

    assert len(without) == len(seen)


@pytest.mark.parametrize(("quota", "on_sqlite"), ((None, 1), (ROOM, 4)))
def test_an_answer_is_counted_in_the_statement_that_stores_it(
    open_store: OpenStore, quota: Quota | None, on_sqlite: int
) -> None:
    """On PostgreSQL; on SQLite in its transaction. Without quotas it is what it was."""
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))

    with sent(store) as seen:
        store.complete(key, token, PAYLOAD, keep=KEEP)

    assert (1 if store.database.dialect.name == POSTGRESQL else on_sqlite) == len(seen)


def test_a_process_without_quota_still_counts_counted_keys(open_store: OpenStore) -> None:
    """A worker of the release before may finish what another has claimed; and so may one that took over."""
    claiming, completing, tid = open_store(), open_store(), a_key().tid
    key, token = a_key(tid=tid), a_token()
    granted(claiming.claim(a_request(key), token=token, lease=LEASE, quota=ROOM))

    completing.complete(key, token, PAYLOAD, keep=KEEP)

    assert (Usage(1, PAYLOAD.byte_size, 0, 1), Drift()) == (claiming.ledger.usage(tid), claiming.ledger.reconcile(tid))


@by_every_strategy
def test_an_uncounted_claim_of_a_counted_key_counts_no_more(
    open_store: OpenStore, clock: FrozenClock, strategy: str
) -> None:
    store, tid = open_store(strategy=strategy), a_key().tid
    key, token = complete(store, tid), a_token()
    clock.advance(KEEP * 2)

    granted(store.claim(a_request(key), token=token, lease=LEASE))
    assert Usage() == store.ledger.usage(tid)
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert (Usage(), Drift()) == (store.ledger.usage(tid), store.ledger.reconcile(tid))


def test_two_rates_are_two_windows(open_store: OpenStore, clock: FrozenClock) -> None:
    """
    An endpoint with ten a minute must not be shut by another's thousand an hour, whose window may end with its own.
    """
    store, tid = open_store(), a_key().tid
    clock.advance(3600 - clock.now % 3600 + 3570)
    by_hour, by_minute = Quota(new_keys=NewKeys(9, 3600)), Quota(new_keys=NewKeys(2, 60))
    for _ in range(5):
        granted(ask(store, tid, by_hour))

    granted(ask(store, tid, by_minute))
    granted(ask(store, tid, by_minute))

    assert isinstance(ask(store, tid, by_minute), OverQuota)
    granted(ask(store, tid, by_hour))


def test_lifetimes_end_at_few_edges(open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock) -> None:
    """However many answers there are: a ledger is as long as there are buckets and shards."""
    store, tid = open_store(), a_key().tid
    for _ in range(20):
        complete(store, tid)
        clock.advance(1)
    now, width = round(clock.now * 1_000_000), bucket_width_ms(KEEP)
    edges = {bucket_edge_ms(now - back * 1_000_000, round(KEEP * 1_000_000), width_ms=width) for back in range(1, 21)}

    with make_engine().connect() as connection:
        kept = connection.execute(select(quota_buckets.c.bucket_end).where(quota_buckets.c.kind == RESPONSES)).scalars()
        assert {edge * 1000 for edge in edges} == set(kept)


def entries(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(quota_buckets)).scalar_one()


def test_expired_quota_entries_are_swept(open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock) -> None:
    store, tid, engine = open_store(), a_key().tid, make_engine()
    for _ in range(3):
        complete(store, tid)
        clock.advance(KEEP)
    before, there = store.ledger.usage(tid), entries(engine)

    # The two records that have expired go first.
    assert (2, there) == (store.expiry.sweep(horizon=clock.now, limit=2), entries(engine))
    assert (1, there - 1) == (store.expiry.sweep(horizon=clock.now, limit=1), entries(engine))
    while store.expiry.sweep(horizon=clock.now, limit=1000):
        pass

    assert there > entries(engine) > 0
    assert before == store.ledger.usage(tid)


def test_a_response_that_cannot_be_counted_is_not_replaced(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation that stored the longer response without its bytes would leave the quota wrong until a recount."""
    store, tid = open_store(), a_key().tid
    key = complete(store, tid)
    before, longer = store.ledger.usage(tid), replace(PAYLOAD, byte_size=PAYLOAD.byte_size + 100)

    def away(*arguments: object, **options: object) -> None:
        raise StoreUnavailable("the connection is lost")

    with monkeypatch.context() as broken:
        broken.setattr(SqlResponses, "_count", away)
        with pytest.raises(StoreUnavailable):
            store.responses.replace(key, PAYLOAD, longer)

    record = store.read(key)
    assert record is not None
    assert (record.payload, store.ledger.usage(tid)) == (PAYLOAD, before)
    assert store.responses.replace(key, PAYLOAD, longer)
    assert store.ledger.usage(tid).bytes == before.bytes + 100


def test_a_wrong_quota_is_corrected(open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock) -> None:
    store, tid, engine = open_store(), a_key().tid, make_engine()
    keys = [complete(store, tid) for _ in range(3)]
    with engine.begin() as connection:
        connection.execute(records.delete().where(records.c.record_id == keys[0].rid))
        connection.execute(
            update(quota_buckets).where(quota_buckets.c.kind == "responses").values(bytes=quota_buckets.c.bytes + 5)
        )
    rows = len({key.rid[0] % SHARDS for key in keys})

    found = store.ledger.reconcile(tid)

    assert Drift(records=1, bytes=PAYLOAD.byte_size + 5 * rows) == found
    assert Usage(2, 2 * PAYLOAD.byte_size, 0, 3) == store.ledger.usage(tid)
    assert Drift() == store.ledger.reconcile(tid)


def test_a_recount_leaves_concurrent_changes_alone(open_store: OpenStore, clock: FrozenClock) -> None:
    """Whoever completes is in the ledger and among the records in one moment, so nothing of it passes for a drift."""
    store, tid = open_store(), a_key().tid
    rounds = 15

    def work() -> None:
        for _ in range(rounds):
            complete(store, tid)

    def recount() -> set[Drift]:
        return {store.ledger.reconcile(tid) for _ in range(rounds)}

    *_, drifts = at_once(work, work, work, recount)

    assert {Drift()} == drifts
    assert Usage(3 * rounds, 3 * rounds * PAYLOAD.byte_size, 0, 3 * rounds) == store.ledger.usage(tid)


@on_postgresql
def test_an_edge_that_passes_during_a_recount_is_no_drift(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock
) -> None:
    """By a clock that goes on each time that it is asked: both sides are told the same time."""
    store, tid, engine = open_store(), a_key().tid, make_engine()
    for _ in range(3):
        complete(store, tid)
    with engine.begin() as connection:
        edge = connection.execute(
            select(quota_buckets.c.bucket_end).where(quota_buckets.c.kind == RESPONSES).limit(1)
        ).scalar_one()
        connection.execute(text(f"CREATE SEQUENCE ticks START {edge - 3}"))
    ticking = replace(DIALECTS[POSTGRESQL], clock="nextval('ticks')")

    with engine.begin() as connection:
        assert not connection.execute(ledger_statements.drift(ticking), {"my_tenant_id": tid, "now": None}).all()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ExitStack() as ends:
        yield ends.enter_context(ThreadPoolExecutor())


def alone(elsewhere: Connection, tid: bytes) -> None:
    """Somebody holds the tenant's lock, and does not move."""
    lock = ledger_statements.tenant_lock(DIALECTS[POSTGRESQL])
    elsewhere.execute(lock, {**within(a_key(tid=tid), FULL), "now": None})


@by_every_lock
def test_an_exclusive_tenant_lock_blocks_shared_ones(
    open_store: OpenStore, elsewhere: Connection, threads: ThreadPoolExecutor, strategy: str
) -> None:
    """Also where there is plenty of room; and no longer than is good. Other tenants and known keys do not wait."""
    store, tid = open_store(strategy=strategy), a_key().tid
    known = complete(store, tid)
    alone(elsewhere, tid)

    waiting = threads.submit(ask, store, tid, ROOM)
    assert isinstance(ask(store, tid, ROOM, key=known), Record)
    granted(ask(store, a_key().tid, ROOM))
    with pytest.raises(StoreUnavailable):
        waiting.result()

    elsewhere.rollback()
    granted(ask(store, tid, ROOM))


@on_postgresql
def test_an_exclusive_tenant_lock_waits_for_shared_ones(
    open_store: OpenStore, make_engine: MakeEngine, threads: ThreadPoolExecutor
) -> None:
    store, tid, key = open_store(), a_key().tid, a_key()
    statement = ledger_statements.insert_within(DIALECTS[POSTGRESQL])
    sent_before: list[dict[str, Any]] = []
    event.listen(store.database.engine, "before_execute", lambda *args: sent_before.append(args[3]))
    ask(store, tid, Quota(records=MARGIN + 2), key=a_key(tid=tid))
    parameters = {
        **next(each for each in sent_before if "my_tenant_id" in each),
        "my_record_id": key.rid,
        "my_token": a_token(),
    }
    with make_engine().connect() as slow:
        assert slow.execute(statement, parameters).scalar_one() > 0
        refused = threads.submit(ask, store, tid, Quota(records=2))
        while not waits(store):
            assert not refused.done()
        slow.commit()

        assert isinstance(refused.result(), OverQuota)


def waits(store: SqlStore) -> bool:
    with store.database.engine.connect() as connection:
        waiting = connection.execute(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
        return bool(waiting.scalar_one())


@by_every_lock
def test_one_claim_of_a_new_key_is_granted(open_store: OpenStore, strategy: str) -> None:
    """
    The last place a tenant has: the others hear that it is in flight, or that there is no room, and none runs twice.
    """
    store, tid = open_store(strategy=strategy), a_key().tid
    for _ in range(10):
        key = a_key(tid=tid)
        outcomes = at_once(*[lambda key=key: ask(store, tid, Quota(records=200), key=key)] * 8)

        assert 1 == sum(isinstance(outcome, Grant) for outcome in outcomes)
        assert 7 == sum(isinstance(outcome, InFlight) for outcome in outcomes)


@pytest.mark.slow
@on_postgresql
@pytest.mark.parametrize("isolation", ("repeatable read", "serializable"))
def test_a_stricter_isolation_level_costs_retries_only(open_store: OpenStore, records_url: str, isolation: str) -> None:
    """PostgreSQL refuses claims that meet in one entry of the ledger, and the store repeats them.

    Four workers only: among many, one is refused more often than the store repeats.
    """
    url = f"{records_url}?options=-c%20default_transaction_isolation%3D{isolation.replace(' ', '%5C%20')}"
    store, tid, rounds = open_store(url), a_key().tid, 40

    def work() -> None:
        for _ in range(rounds):
            key, token = StorageKey(bytes(8) + a_token() + a_token()[:8], tid), a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE, quota=ROOM))
            store.complete(key, token, PAYLOAD, keep=KEEP)

    at_once(*[work] * 4)

    assert Usage(4 * rounds, 4 * rounds * PAYLOAD.byte_size, 0, 4 * rounds) == store.ledger.usage(tid)
    assert Drift() == store.ledger.reconcile(tid)


def test_an_unreadable_response_is_counted_once(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock
) -> None:
    store, tid, engine = open_store(), a_key().tid, make_engine()
    key = complete(store, tid)
    with engine.begin() as connection:
        connection.execute(update(records).values(fingerprint=b"short"))

    with pytest.raises(CorruptRecord):
        ask(store, tid, ROOM, key=key)

    assert (Usage(1, 0, 0, 1), Drift()) == (store.ledger.usage(tid), store.ledger.reconcile(tid))


CROWD = 6
NEAR = Quota(records=MARGIN)


@by_every_lock
def test_a_tenant_over_quota_is_refused_while_another_holds_its_lock(
    open_store: OpenStore, elsewhere: Connection, strategy: str
) -> None:
    """What is committed suffices to refuse; and a key that is known is told as ever."""
    store, known = open_store(strategy=strategy), a_key()
    granted(ask(store, known.tid, FULL, key=known))
    alone(elsewhere, known.tid)

    assert isinstance(ask(store, known.tid, FULL), OverQuota)
    assert isinstance(ask(store, known.tid, FULL, key=known), InFlight)


@by_every_lock
def test_the_slower_claim_of_one_key_is_in_flight_and_not_refused(open_store: OpenStore, strategy: str) -> None:
    """The last place was taken for it between one look and the next: so it is known, and in flight."""
    store, other, key = open_store(strategy=strategy), open_store(), a_key()
    overtaking = [lambda: granted(ask(other, key.tid, FULL, key=key))]

    def overtake(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        if "first_bucket_end" in statement and overtaking:
            overtaking.pop()()

    event.listen(store.database.engine, "before_cursor_execute", overtake)

    assert isinstance(ask(store, key.tid, FULL, key=key), InFlight)
    assert [] == overtaking


@by_every_lock
def test_waiters_for_one_tenant_leave_connections_to_others(
    records_url: str, make_engine: MakeEngine, elsewhere: Connection, strategy: str
) -> None:
    """Of many that wait for a lock whose holder does not move, with two connections: one is enough for all of them."""
    engine = make_engine(pool_size=2, max_overflow=0, pool_timeout=60)
    store, tid = SqlStore(Database(engine), strategy=strategy), a_key().tid
    alone(elsewhere, tid)

    with ThreadPoolExecutor(CROWD) as threads:
        crowd = [threads.submit(ask, store, tid, NEAR) for _ in range(CROWD)]
        while not waiting(elsewhere):
            assert not any(asker.done() for asker in crowd)
        for _ in range(CROWD):
            granted(ask(store, a_key().tid, ROOM))
        told = [asker.exception() for asker in crowd]

    assert [StoreUnavailable] * CROWD == [type(error) for error in told]
    elsewhere.rollback()
    granted(ask(store, tid, NEAR))
    assert 0 == len(store.database.tenant_lock)
    store.close()


def waiting(connection: Connection) -> bool:
    found = connection.execute(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    return bool(found.scalar_one())


def test_one_thread_gets_the_tenant_lock_and_one_times_out() -> None:
    """Tenants do not know of each other, and nobody is remembered who has gone."""
    turnstile = TenantLock()

    with turnstile.turn(b"one", timeout=0) as first, turnstile.turn(b"two", timeout=0) as other:
        with turnstile.turn(b"one", timeout=0) as second:
            assert (True, True, False) == (first, other, second)
        assert 2 == len(turnstile)

    assert 0 == len(turnstile)


def test_a_forked_child_does_not_inherit_tenant_locks() -> None:
    turnstile = TenantLock()

    with turnstile.turn(b"one", timeout=0):
        turnstile.after_fork()
        with turnstile.turn(b"one", timeout=0) as mine:
            assert mine

    assert 0 == len(turnstile)
