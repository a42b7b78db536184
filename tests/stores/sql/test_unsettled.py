"""What others than owners do with rows: by indexes, in one statement each, and without waiting for whom they need not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select, update

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql import dialects
from flask_idempotency.stores.sql.admin import janitor
from flask_idempotency.stores.sql.dialects import dialect_of, in_microseconds
from flask_idempotency.stores.sql.schema import records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    granted,
    seen,
    stood,
)
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql
from tests.stores.sql.counting import sent
from tests.stores.sql.plans import fill, plan_of

IN_2106 = 2**32 * 1_000_000


@pytest.fixture
def store(open_store: OpenStore) -> SqlStore:
    return open_store()


@pytest.fixture
def elsewhere(make_engine: MakeEngine, records_url: str) -> Iterator[Connection]:
    """A transaction that stays open until the test says otherwise."""
    with make_engine().connect() as connection:
        yield connection


@given(st.integers(0, IN_2106))
def test_a_time_is_told_back_to_the_microsecond(us: int) -> None:
    """A record tells its deadline as a float, and is compared by it."""
    assert us == in_microseconds(us / 1_000_000)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("stale", "idempotency_expired_leases"),
        ("due", "idempotency_quarantined"),
        ("walk_processing", "idempotency_expired_leases"),
        ("walk_quarantined", "idempotency_quarantined"),
        ("standing", "idempotency_expired_leases"),
        ("standing", "idempotency_quarantined"),
    ],
)
def test_the_few_are_found_by_an_index_of_them(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine, name: str, index: str
) -> None:
    """Not by looking through all that are completed."""
    for standing in ("completed", "quarantined", "lapsed, quarantine"):
        stood(store, clock, standing)
    with make_engine().connect() as connection:
        fill(connection)
        plan = plan_of(connection, getattr(janitor, name)(dialect_of(connection.dialect.name)))

    assert index in plan
    assert "Seq Scan on idempotency_records" not in plan


def test_each_change_is_one_statement(store: SqlStore, clock: FrozenClock) -> None:
    """So it needs no transaction, and no pooler has to keep a connection for it."""
    lapsed, _ = stood(store, clock, "lapsed, quarantine")
    held, _ = stood(store, clock, "quarantined")
    freed, _ = stood(store, clock, "quarantined")
    with sent(store) as statements:
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert store.recovery.force_release(freed)
        store.recovery.counts()
        store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=10)

    assert 5 == len(statements)


def test_a_freed_row_holds_nothing_of_an_answer(store: SqlStore, clock: FrozenClock, make_engine: MakeEngine) -> None:
    """It is absent to everybody, and no backup needs to keep what it said."""
    done, _ = stood(store, clock, "completed")
    assert store.recovery.force_release(done)
    with make_engine().connect() as connection:
        row = connection.execute(select(records).where(records.c.record_id == done.key.rid)).mappings().one()

    left = ("state", "response", "status", "completed_at", "wrapping_key_id", "data_key_number", "lease_expires_at")
    assert ["released", *[None] * 6] == [row[name] for name in left]


def test_a_reply_that_was_lost_is_not_taken_for_somebody_elses_work(store: SqlStore, clock: FrozenClock) -> None:
    """To free is repeated when the connection broke, and finds its own work."""
    held, _ = stood(store, clock, "quarantined")
    run = store.database.run

    def run_twice(work: Any) -> Any:
        run(work)
        return run(work)

    store.recovery._database = type("Twice", (), {"run": staticmethod(run_twice), "dialect": store.database.dialect})()

    assert store.recovery.force_release(held)


def test_an_owners_release_is_not_taken_for_ones_own(store: SqlStore, clock: FrozenClock) -> None:
    """Whoever was too late to free a key says so."""
    held, token = stood(store, clock, "quarantined")
    store.release(held.key, token)

    assert not store.recovery.force_release(held)


def test_a_counted_answer_that_is_freed_leaves_its_ledger(store: SqlStore, clock: FrozenClock) -> None:
    """With all its bytes, from the very bucket that it was put into."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=10)))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    before = store.ledger.usage(key.tid)

    assert store.recovery.force_release(seen(store, key))
    assert (1, PAYLOAD.byte_size) == (before.records, before.bytes)
    assert (0, 0) == (store.ledger.usage(key.tid).records, store.ledger.usage(key.tid).bytes)
    assert store.ledger.reconcile(key.tid).none


def spoil(engine: MakeEngine, key: StorageKey) -> None:
    with engine().begin() as connection:
        connection.execute(update(records).where(records.c.record_id == key.rid).values(token=b"short"))


@pytest.mark.parametrize("how", ("stale", "due", "walk"))
def test_rows_that_cannot_be_read_keep_nobody_from_the_others(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine, how: str
) -> None:
    """They are left out, though they come first and fill a batch."""
    spoilt, fine = (stood(store, clock, "lapsed, quarantine" if how == "stale" else "quarantined")[0] for _ in range(2))
    spoil(make_engine, spoilt.key)

    def found() -> Iterator[SeenRecord]:
        after: bytes | None = b""
        while after is not None:
            if how == "due":
                yield from store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=1)
                return
            if how == "stale":
                sheet = store.recovery.expired_leases(horizon=clock.now, after=after, limit=1)
            else:
                sheet = store.recovery.scan(State.QUARANTINED, after=after, limit=1)
            yield from sheet.found
            after = sheet.after

    assert [fine.key] == [each.key for each in found()]


@on_postgresql
def test_a_janitor_does_not_wait_for_an_owner(store: SqlStore, clock: FrozenClock, elsewhere: Connection) -> None:
    """Whoever holds the row is its owner, or does the same: it is left to them."""
    lapsed, _ = stood(store, clock, "lapsed, quarantine")
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == lapsed.key.rid).with_for_update())

    assert not store.recovery.quarantine_expired(lapsed, horizon=clock.now)


@on_postgresql
def test_a_turn_that_somebody_holds_is_left_to_them(store: SqlStore, clock: FrozenClock, elsewhere: Connection) -> None:
    """The next one is given, and nobody waits."""
    held, other = (stood(store, clock, "quarantined")[0] for _ in range(2))
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == held.key.rid).with_for_update())

    assert [other.key] == [
        each.key for each in store.recovery.next_for_resolver(horizon=clock.now, least=1, most=2, limit=10)
    ]


@on_postgresql
@pytest.mark.parametrize("verb", ("free", "settle"))
def test_a_person_hears_that_nobody_can_tell(
    store: SqlStore, clock: FrozenClock, elsewhere: Connection, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """While somebody else's transaction has the row, "something else is there by now" would be a guess."""
    monkeypatch.setattr(dialects, "LOCK_TIMEOUT_MS", 50)
    held, _ = stood(store, clock, "quarantined")
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == held.key.rid).with_for_update())

    settle = partial(store.recovery.resolve, token=a_token(), payload=PAYLOAD, keep=KEEP)
    act: Callable[[SeenRecord], bool] = store.recovery.force_release if verb == "free" else settle
    with pytest.raises(StoreUnavailable):
        act(held)


def test_what_is_asked_about_first_is_what_waits_longest(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine
) -> None:
    """Whoever was never asked about comes before those that were, and those in the order of their turns."""
    first, second = stood(store, clock, "quarantined")[0], stood(store, clock, "quarantined")[0]

    def ask(limit: int) -> list[StorageKey]:
        return [
            each.key for each in store.recovery.next_for_resolver(horizon=clock.now, least=10, most=10, limit=limit)
        ]

    assert {first.key, second.key} == {*ask(1), *ask(1)}
    with make_engine().connect() as connection:
        turns = connection.execute(select(func.count()).where(records.c.resolver_due_at > 0)).scalar_one()
    third = stood(store, clock, "quarantined")[0]
    clock.advance(20)

    assert (2, [third.key]) == (turns, ask(1))
