"""The janitor's statements: they use indexes, and do not wait for owners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, func, insert, select, text, update

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, Record, State
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql import activity
from flask_idempotency.stores.sql.admin import janitor
from flask_idempotency.stores.sql.claiming import RETRY_SECONDS
from flask_idempotency.stores.sql.dialects import POSTGRESQL, in_microseconds
from flask_idempotency.stores.sql.schema import PROCESSING, QUARANTINED, quota_buckets, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    Kit,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.stores.sql.conftest import (
    LockTimeout,
    MakeEngine,
    OpenStore,
    by_every_lock,
    by_every_strategy,
    on_postgresql,
)
from tests.stores.sql.counting import sent
from tests.stores.sql.plans import fill, plan_of
from tests.tooling.processes import eventually

IN_2106 = 2**32 * 1_000_000


@pytest.fixture
def store(open_store: OpenStore) -> SqlStore:
    return open_store()


@given(st.integers(0, IN_2106))
def test_times_are_exact_to_the_microsecond(us: int) -> None:
    assert us == in_microseconds(us / 1_000_000)


def test_unfinished_and_expired_rows_are_found_by_an_index(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine
) -> None:
    indexes = {
        "expired_leases": ["idempotency_expired_leases"],
        "next_for_resolver": ["idempotency_quarantined"],
        "count_unfinished": ["idempotency_expired_leases", "idempotency_quarantined"],
        "delete_expired": ["idempotency_expiry"],
        "remove_responses": ["idempotency_response_expiry"],
    }
    for standing in ("completed", "quarantined", "lapsed, quarantine"):
        Kit(store, clock).stood(standing)
    with make_engine().connect() as connection:
        fill(connection)
        dialect = store.database.dialect
        made = [(used, getattr(janitor, name)(dialect)) for name, used in indexes.items()]
        for state, index in ((PROCESSING, "idempotency_expired_leases"), (QUARANTINED, "idempotency_quarantined")):
            made.append(([index], janitor.scan_unfinished(dialect, state)))
        for used, statement in made:
            plan = plan_of(connection, statement, my_horizon=1)

            assert [] == [index for index in used if index not in plan]
            assert "Seq Scan on idempotency_records" not in plan, used


def test_a_change_is_one_statement_unless_it_ends_a_journal(store: SqlStore, clock: FrozenClock) -> None:
    """So it needs no transaction, and no pooler has to keep a connection for it. A journal ends with its record."""
    lapsed, _ = Kit(store, clock).stood("lapsed, quarantine")
    held, _ = Kit(store, clock).stood("quarantined")
    freed, _ = Kit(store, clock).stood("quarantined")
    with sent(store) as statements:
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert store.recovery.force_release(freed)
        store.recovery.counts()
        store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=10)

    ended = ["UPDATE idempotency_records", "DELETE FROM"]
    if store.database.dialect.name == POSTGRESQL:
        quarantined, resolved, released, read = statements[:1], statements[1:2], statements[2:4], statements[4:]
        assert (["WITH done"], ended) == (resolved, released)
    else:
        quarantined, resolved, released, read = statements[:1], statements[1:5], statements[5:9], statements[9:]
        assert ([["BEGIN IMMEDIATE", *ended, "COMMIT"]] * 2) == [resolved, released]
    assert (["UPDATE idempotency_records"], 2) == (quarantined, len(read))


def test_a_released_row_holds_no_response(store: SqlStore, clock: FrozenClock, make_engine: MakeEngine) -> None:
    done, _ = Kit(store, clock).stood("completed")
    assert store.recovery.force_release(done)
    with make_engine().connect() as connection:
        row = connection.execute(select(records).where(records.c.record_id == done.key.rid)).mappings().one()

    left = ("state", "response", "status", "completed_at", "wrapping_key_id", "data_key_number", "lease_expires_at")
    assert ["released", *[None] * 6] == [row[name] for name in left]


def test_a_lost_reply_is_not_taken_for_a_foreign_release(store: SqlStore, clock: FrozenClock) -> None:
    """To free is repeated when the connection broke, and finds its own work."""
    held, _ = Kit(store, clock).stood("quarantined")
    run = store.database.run

    def run_twice(work: Any) -> Any:
        run(work)
        return run(work)

    store.recovery._database = type("Twice", (), {"run": staticmethod(run_twice), "dialect": store.database.dialect})()

    assert store.recovery.force_release(held)


def test_a_release_by_the_owner_is_not_reported_as_forced(store: SqlStore, clock: FrozenClock) -> None:
    held, token = Kit(store, clock).stood("quarantined")
    store.release(held.key, token)

    assert not store.recovery.force_release(held)


def test_a_released_response_is_no_longer_counted(store: SqlStore, clock: FrozenClock) -> None:
    """With all its bytes, from the very bucket that it was put into."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=10)))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    before = store.ledger.usage(key.tid)

    assert store.recovery.force_release(SeenRecord(key, found(store, key)))
    assert (1, PAYLOAD.byte_size) == (before.records, before.bytes)
    assert (0, 0) == (store.ledger.usage(key.tid).records, store.ledger.usage(key.tid).bytes)
    assert store.ledger.reconcile(key.tid).none


def spoil(engine: MakeEngine, key: StorageKey) -> None:
    with engine().begin() as connection:
        connection.execute(update(records).where(records.c.record_id == key.rid).values(token=b"short"))


@pytest.mark.parametrize("how", ("expired leases", "due", "scan"))
def test_unreadable_rows_do_not_hide_the_others(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine, how: str
) -> None:
    standing: Standing = "lapsed, quarantine" if how == "expired leases" else "quarantined"
    spoilt, fine = (Kit(store, clock).stood(standing)[0] for _ in range(2))
    spoil(make_engine, spoilt.key)

    def found() -> Iterator[SeenRecord]:
        after: bytes | None = b""
        while after is not None:
            if how == "due":
                yield from store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=1)
                return
            if how == "expired leases":
                sheet = store.recovery.expired_leases(horizon=clock.now, after=after, limit=1)
            else:
                sheet = store.recovery.scan(State.QUARANTINED, after=after, limit=1)
            yield from sheet.found
            after = sheet.after

    assert [fine.key] == [each.key for each in found()]


@on_postgresql
def test_a_janitor_does_not_wait_for_an_owner(store: SqlStore, clock: FrozenClock, elsewhere: Connection) -> None:
    """Whoever holds the row is its owner, or does the same: it is left to them."""
    lapsed, _ = Kit(store, clock).stood("lapsed, quarantine")
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == lapsed.key.rid).with_for_update())

    assert not store.recovery.quarantine_expired(lapsed, horizon=clock.now)


@on_postgresql
def test_a_row_that_another_run_holds_is_skipped(store: SqlStore, clock: FrozenClock, elsewhere: Connection) -> None:
    """The next one is given, and nobody waits."""
    held, other = (Kit(store, clock).stood("quarantined")[0] for _ in range(2))
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == held.key.rid).with_for_update())

    assert [other.key] == [
        each.key for each in store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=10)
    ]


@on_postgresql
@pytest.mark.parametrize("verb", ("free", "settle"))
def test_an_operator_gets_unavailable_for_a_locked_row(
    store: SqlStore, clock: FrozenClock, elsewhere: Connection, lock_timeout: LockTimeout, verb: str
) -> None:
    """While somebody else's transaction has the row, "something else is there by now" would be a guess."""
    lock_timeout(50)
    held, _ = Kit(store, clock).stood("quarantined")
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == held.key.rid).with_for_update())

    settle = partial(store.recovery.resolve, token=a_token(), payload=PAYLOAD, keep=KEEP)
    act: Callable[[SeenRecord], bool] = store.recovery.force_release if verb == "free" else settle
    with pytest.raises(StoreUnavailable):
        act(held)


def test_the_row_that_waits_longest_comes_first(store: SqlStore, clock: FrozenClock, make_engine: MakeEngine) -> None:
    """Whoever was never asked about comes before those that were, and those in the order of their turns."""
    first, second = Kit(store, clock).stood("quarantined")[0], Kit(store, clock).stood("quarantined")[0]

    def ask(limit: int) -> list[StorageKey]:
        return [
            each.key for each in store.recovery.next_for_resolver(horizon=clock.now, least=10, most=10, limit=limit)
        ]

    assert {first.key, second.key} == {*ask(1), *ask(1)}
    with make_engine().connect() as connection:
        turns = connection.execute(select(func.count()).where(records.c.resolver_due_at > 0)).scalar_one()
    third = Kit(store, clock).stood("quarantined")[0]
    clock.advance(20)

    assert (2, [third.key]) == (turns, ask(1))


ROUNDS, CLAIMERS, SWEEPERS = 25, 8, 3
DAY = 86400.0
ANSWER_SECONDS = 60.0


def answers(store: SqlStore, number: int, *, quota: Quota | None = None) -> list[object]:
    keys = [a_key() for _ in range(number)]
    for key in keys:
        token = a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
        store.complete(key, token, PAYLOAD, keep=KEEP)
    return list(keys)


@pytest.mark.slow
@by_every_strategy
@pytest.mark.parametrize("quota", (None, Quota(records=10**6)), ids=("alone", "counted"))
def test_an_expired_key_has_one_new_owner_while_it_is_removed(
    open_store: OpenStore, clock: FrozenClock, strategy: str, quota: Quota | None
) -> None:
    """Whoever it is keeps the record: nobody removes the new one for the old one's end."""
    store = open_store(strategy=strategy)
    for _ in range(ROUNDS):
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        clock.advance(2 * KEEP)

        def claim(key: object = key) -> object:
            mine = a_token()
            outcome = store.claim(a_request(key), token=mine, lease=LEASE, quota=quota)  # type: ignore[arg-type]
            return mine if isinstance(outcome, Grant) else outcome

        def sweep() -> object:
            return store.expiry.sweep(horizon=clock.now, limit=10)

        outcomes = at_once(*[claim] * CLAIMERS, *[sweep] * SWEEPERS)

        owners = [outcome for outcome in outcomes if isinstance(outcome, bytes)]
        others = [outcome for outcome in outcomes[:CLAIMERS] if not isinstance(outcome, bytes)]
        record = store.read(key)
        assert record is not None
        assert [record.token] == owners
        assert (State.PROCESSING, [True] * (CLAIMERS - 1)) == (
            record.state,
            [isinstance(outcome, InFlight) for outcome in others],
        )


@by_every_lock
def test_a_claim_waits_for_its_row_to_be_removed(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, strategy: str, lock_timeout: LockTimeout
) -> None:
    """And has the key then: a second later there would have been nothing to wait for."""
    lock_timeout(60_000)
    store, key = open_store(strategy=strategy), a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)
    elsewhere.execute(delete(records).where(records.c.record_id == key.rid))
    with ThreadPoolExecutor(1) as threads:
        claimed = threads.submit(lambda: store.claim(a_request(key), token=a_token(), lease=LEASE))
        eventually(lambda: _somebody_waits(elsewhere) or claimed.done())
        elsewhere.commit()

        assert isinstance(claimed.result(ANSWER_SECONDS), Grant)


@by_every_lock
def test_a_row_whose_removal_is_rolled_back_is_in_flight_for_a_moment(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, strategy: str
) -> None:
    store, key = open_store(strategy=strategy), a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)
    elsewhere.execute(delete(records).where(records.c.record_id == key.rid))

    assert InFlight(RETRY_SECONDS) == store.claim(a_request(key), token=a_token(), lease=LEASE)
    elsewhere.rollback()
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Grant)


@on_postgresql
def test_a_row_in_use_again_is_skipped(store: SqlStore, clock: FrozenClock, elsewhere: Connection) -> None:
    """Nobody waits for them, and the rest is removed."""
    used, removed = a_key(), a_key()
    for key in (used, removed):
        stand(store, clock, key, "completed")
    clock.advance(KEEP)
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == used.rid).with_for_update())

    assert 1 == store.expiry.sweep(horizon=clock.now, limit=10)
    elsewhere.rollback()
    assert 1 == store.expiry.sweep(horizon=clock.now, limit=10)


def test_a_row_that_expired_before_completion_stays(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine
) -> None:
    """It was damaged, and to remove it is to run its payment again."""
    key = a_key()
    stand(store, clock, key, "completed")
    with make_engine().begin() as connection:
        connection.execute(update(records).where(records.c.record_id == key.rid).values(expires_at=1))
    clock.advance(DAY)

    assert 0 == store.expiry.sweep(horizon=clock.now, limit=10)


@pytest.mark.parametrize("verb", ("released", "freed"))
def test_a_released_row_is_removed_after_a_day(store: SqlStore, clock: FrozenClock, verb: str) -> None:
    """Until then somebody may ask what became of the key."""
    key = a_key()
    token = stand(store, clock, key, "in flight")
    if verb == "released":
        store.release(key, token)
    else:
        (found,) = store.recovery.scan(State.PROCESSING, limit=10).found
        assert store.recovery.force_release(found)
    clock.advance(DAY - 1)
    before = store.expiry.sweep(horizon=clock.now, limit=10)
    clock.advance(1)

    assert (0, 1) == (before, store.expiry.sweep(horizon=clock.now, limit=10))


def test_quota_entries_are_removed_with_the_last_record(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine
) -> None:
    answers(store, 3, quota=Quota(records=100, new_keys=NewKeys(100, 60.0)))
    clock.advance(2 * KEEP)
    with make_engine().begin() as connection:
        before = connection.execute(select(func.count()).select_from(quota_buckets)).scalar_one()
        later = {"kind": "responses", "bucket_end": 2**60, "window_length": 0, "shard": 0, "records": 1, "bytes": 1}
        connection.execute(insert(quota_buckets).values(tenant_id=bytes(16), **later))
    first = store.expiry.sweep(horizon=clock.now, limit=3)
    with make_engine().connect() as connection:
        untouched = connection.execute(select(func.count()).select_from(quota_buckets)).scalar_one()
    rest = [store.expiry.sweep(horizon=clock.now, limit=100) for _ in range(2)]

    assert (3, before + 1, [before, 0]) == (first, untouched, rest)


def test_quota_entries_after_the_horizon_stay(store: SqlStore, clock: FrozenClock) -> None:
    """A clock that was set forward ends no bucket for good: its records will be counted again."""
    tid, token = a_key().tid, a_token()
    key, before = a_key(tid=tid), clock.now
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=100)))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    clock.advance(2 * DAY)
    removed = store.expiry.sweep(horizon=before, limit=10)
    clock.advance(-2 * DAY)

    assert (0, 1) == (removed, store.ledger.usage(tid).records)


@pytest.mark.slow
def test_claims_and_completions_continue_during_a_quota_sweep(store: SqlStore, clock: FrozenClock) -> None:
    quota, stop = Quota(records=10**6, new_keys=NewKeys(10**6, 1.0)), threading.Event()
    tid = a_key().tid

    def sweep() -> None:
        while not stop.is_set():
            store.expiry.sweep(horizon=clock.now, limit=50)

    def work() -> None:
        for _ in range(30):
            key, token = a_key(tid=tid), a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
            store.complete(key, token, PAYLOAD, keep=KEEP)
            clock.advance(0.25)

    with ThreadPoolExecutor(1) as threads:
        sweeping = threads.submit(sweep)
        try:
            at_once(*[work] * 3)
        finally:
            stop.set()
        sweeping.result(ANSWER_SECONDS)

    assert (90, True) == (store.ledger.usage(tid).records, store.ledger.reconcile(tid).none)


def test_a_live_response_is_replayed_during_a_sweep(store: SqlStore, clock: FrozenClock) -> None:
    answers(store, 5)
    clock.advance(KEEP)
    living = a_key()
    stand(store, clock, living, "completed")

    assert 5 == store.expiry.sweep(horizon=clock.now + DAY, limit=100)
    assert isinstance(store.claim(a_request(living), token=a_token(), lease=LEASE), Record)


def test_what_expired_beside_records_is_found_by_an_index(store: SqlStore, make_engine: MakeEngine) -> None:
    with make_engine().connect() as connection:
        if store.database.dialect.name == POSTGRESQL:
            # Of an empty table the planner would read the whole.
            connection.execute(text("SET enable_seqscan = off"))
        for table in activity.SWEPT:
            swept = activity.delete_expired(store.database.dialect, table)
            assert "_expiry" in plan_of(connection, swept, my_horizon=1), table.name


def test_a_page_of_a_tenant_leaves_out_no_record(store: SqlStore, clock: FrozenClock) -> None:
    """It looks at more rows than it may show, so it may stop in the middle of them."""
    tid = a_key().tid
    keys = {a_key(tid=tid) for _ in range(25)}
    for key in keys:
        stand(store, clock, key, "completed")
    answers(store, 25)
    found, sizes = set[StorageKey](), list[int]()
    after: bytes | None = b""
    while after is not None:
        page = store.recovery.scan(State.COMPLETED, after=after, limit=10, tid=tid)
        found.update(each.key for each in page.found)
        sizes.append(len(page.found))
        after = page.after

    assert keys == found
    assert [10, 10, 5] == sizes


def test_a_page_of_a_tenant_passes_over_many_records_of_others(
    store: SqlStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a list of a small tenant would take a page for every few records of the others."""
    answers(store, 60)
    key = a_key()
    stand(store, clock, key, "completed")

    assert [key] == [each.key for each in store.recovery.scan(State.COMPLETED, limit=2, tid=key.tid).found]
    monkeypatch.setattr(janitor, "LOOKED_AT", 20)
    pages = 0
    after: bytes | None = b""
    while after is not None:
        after = store.recovery.scan(State.COMPLETED, after=after, limit=2, tid=key.tid).after
        pages += 1
    assert 4 == pages


def _somebody_waits(connection: Connection) -> bool:
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return bool(connection.execute(waiting).scalar_one())
