"""Somebody else's transaction has the row, and does not move."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, text

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import Grant, InFlight, Unknown
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claiming import RETRY_SECONDS, number_of
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import PROCESSING, TAKEOVER, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    LEASE,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import LockTimeout, MakeEngine, OpenStore, by_every_lock, on_postgresql
from tests.stores.sql.counting import sent
from tests.stores.sql.test_statements import WRITES
from tests.tooling.processes import eventually

PATIENCE_MS = 100
AGAIN = {
    "insert": ["WITH granted", "WITH granted"],
    "row_lock": ["WITH granted", "WITH granted"],
    "advisory": ["WITH granted", "WITH granted"],
}
"""What a claim sends that finds neither a place for its row nor the row, and looks again."""
AT_ONCE_SECONDS = 60.0
"""Far above what an answer takes, far below waiting for a transaction that never ends."""


@pytest.fixture(autouse=True)
def patience(lock_timeout: LockTimeout) -> None:
    lock_timeout(PATIENCE_MS)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ExitStack() as ends:
        yield ends.enter_context(ThreadPoolExecutor())


def lock(elsewhere: Connection, rid: bytes) -> None:
    elsewhere.execute(select(records.c.record_id).where(records.c.record_id == rid).with_for_update())


def insert_a_row(elsewhere: Connection, rid: bytes, *, now: float) -> None:
    elsewhere.execute(
        insert(records).values(
            record_id=rid,
            tenant_id=bytes(16),
            state=PROCESSING,
            token=a_token(),
            fence=1,
            attempt=1,
            fingerprint=FINGERPRINT,
            on_expiry=TAKEOVER,
            tenant="",
            principal="",
            method="",
            endpoint="",
            requested_at=round(now * 1_000_000),
            lease_expires_at=round((now + LEASE) * 1_000_000),
            in_quota=0,
        )
    )


def somebody_waits(connection: Connection) -> bool:
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return bool(connection.execute(waiting).scalar_one())


@by_every_lock
@pytest.mark.parametrize("standing", ("lapsed, takeover", "lapsed, quarantine"))
def test_a_claim_does_not_wait_for_a_locked_row(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, strategy: str, standing: str
) -> None:
    """It is in flight, as far as anybody can tell, and nothing was written. Free again, it is taken."""
    store, key = open_store(strategy=strategy), a_key()
    stand(store, clock, key, "lapsed, takeover" if standing == "lapsed, takeover" else "lapsed, quarantine")
    before = found(store, key)
    lock(elsewhere, key.rid)

    started = time.monotonic()
    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert InFlight(RETRY_SECONDS) == outcome
    assert time.monotonic() - started < AT_ONCE_SECONDS
    assert before == found(store, key)
    elsewhere.rollback()
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Grant | Unknown)


@by_every_lock
def test_a_locked_row_is_replayed(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, strategy: str
) -> None:
    """What is certain without the lock is said without it: an answer, a mismatch, a live lease."""
    store, done, alive = open_store(strategy=strategy), a_key(), a_key()
    stand(store, clock, done, "completed")
    stand(store, clock, alive, "in flight")
    lock(elsewhere, done.rid)
    lock(elsewhere, alive.rid)

    assert found(store, done) == store.claim(a_request(done), token=a_token(), lease=LEASE)
    assert InFlight(LEASE) == store.claim(a_request(alive), token=a_token(), lease=LEASE)


@on_postgresql
@pytest.mark.parametrize("verb", list(WRITES))
def test_an_owner_waits_for_its_row_until_the_lock_timeout(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, verb: str
) -> None:
    """A worker must not hang on a transaction that never ends. Nothing was written, and later it works."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "in flight")
    before = found(store, key)
    lock(elsewhere, key.rid)

    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        WRITES[verb](store, key, token)

    assert PATIENCE_MS / 1000 <= time.monotonic() - started < AT_ONCE_SECONDS
    assert before == found(store, key)
    elsewhere.rollback()
    WRITES[verb](store, key, token)


@on_postgresql
def test_the_lock_timeout_ends_with_its_statement(open_store: OpenStore, clock: FrozenClock) -> None:
    """On a pooler's connection the next one is somebody else's."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "in flight")
    with store.database.engine.connect() as connection:
        asked = {"my_record_id": key.rid, "my_token": token, "lease": 1, "now": 1}
        assert connection.execute(statements.renew(store.database.dialect), asked).one()

        assert "0" == connection.execute(text("SHOW lock_timeout")).scalar_one()


@by_every_lock
def test_a_claim_does_not_wait_for_an_insert_that_never_ends(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection, strategy: str
) -> None:
    """Somebody is about to own the key, or not; after our patience it is in flight, and nobody was granted it."""
    store, key = open_store(strategy=strategy), a_key()
    insert_a_row(elsewhere, key.rid, now=clock.now)

    assert InFlight(RETRY_SECONDS) == store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert store.read(key) is None
    elsewhere.rollback()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


@by_every_lock
def test_a_row_inserted_during_a_claim_is_found(
    open_store: OpenStore,
    clock: FrozenClock,
    elsewhere: Connection,
    make_engine: MakeEngine,
    threads: ThreadPoolExecutor,
    lock_timeout: LockTimeout,
    strategy: str,
) -> None:
    """
    The claim's snapshot is older than the other's commit: it can neither insert the row nor see it. That is not a
    grant; asked once more, the other's lease is what it hears.
    """
    lock_timeout(20_000)
    store, key = open_store(strategy=strategy), a_key()
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    insert_a_row(elsewhere, key.rid, now=clock.now)

    with sent(store) as statements, make_engine(isolation_level="AUTOCOMMIT").connect() as watcher:
        claim: Future[StoreOutcome] = threads.submit(store.claim, a_request(key), token=a_token(), lease=LEASE)
        assert eventually(lambda: somebody_waits(watcher))
        elsewhere.commit()
        outcome = claim.result(timeout=60)

    assert InFlight(LEASE) == outcome
    assert AGAIN[strategy] == [statement.split("(")[0] for statement in statements]


@on_postgresql
def test_a_locked_advisory_number_grants_no_claim(
    open_store: OpenStore, clock: FrozenClock, elsewhere: Connection
) -> None:
    """An advisory lock that somebody holds and never gives back: what can be read is said, a free key is in flight."""
    store, free, done = open_store(strategy="advisory"), a_key(), a_key()
    stand(store, clock, done, "completed")
    for key in (free, done):
        elsewhere.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number_of(key.rid)})

    assert InFlight(RETRY_SECONDS) == store.claim(a_request(free), token=a_token(), lease=LEASE)
    assert found(store, done) == store.claim(a_request(done), token=a_token(), lease=LEASE)
    assert store.read(free) is None


@on_postgresql
def test_a_lease_begins_after_the_wait_for_an_advisory_lock(
    make_engine: MakeEngine,
    elsewhere: Connection,
    threads: ThreadPoolExecutor,
    lock_timeout: LockTimeout,
) -> None:
    """Otherwise a claim that waited would have less time than it was granted."""
    lock_timeout(20_000)
    store, key = SqlStore(Database(make_engine()), strategy="advisory"), a_key()
    elsewhere.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number_of(key.rid)})

    with make_engine(isolation_level="AUTOCOMMIT").connect() as watcher:
        claim: Future[StoreOutcome] = threads.submit(store.claim, a_request(key), token=a_token(), lease=LEASE)
        assert eventually(lambda: somebody_waits(watcher))
        waited_until = watcher.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
        elsewhere.commit()
        granted(claim.result(timeout=60))

    assert found(store, key).requested_at >= waited_until


@on_postgresql
def test_an_advisory_lock_does_not_outlive_its_claim(open_store: OpenStore, elsewhere: Connection) -> None:
    """The session's kind would stay with a connection that a pooler gives to others."""
    store = open_store(strategy="advisory")
    store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    held = elsewhere.execute(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).scalar_one()

    assert 0 == held


@by_every_lock
def test_an_owner_that_returns_during_a_take_over_keeps_its_row(
    open_store: OpenStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """
    The row was lapsed when it was read, and is not when it is written: what was read is compared with what is there.
    """
    store, key = open_store(strategy=strategy), a_key()
    token = stand(store, clock, key, "lapsed, takeover")
    owner = open_store()
    meddle_after_reading(store, lambda: owner.renew(key, token, lease=LEASE), monkeypatch)

    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)

    # By row lock the owner cannot come back in between: it waits, in vain.
    assert isinstance(outcome, InFlight if strategy != "row_lock" else Grant)
    assert (token == found(store, key).token) == (strategy != "row_lock")


@on_postgresql
def test_a_write_replaces_only_the_row_that_was_read(
    open_store: OpenStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Somebody has claimed and released the key in between: it looks the same, and is another one. So it is read again.
    """
    store, other, key = open_store(), open_store(), a_key()
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    other.release(key, stand(other, clock, key, "in flight"))

    def use_it() -> None:
        other.release(key, stand(other, clock, key, "in flight"))

    meddle_after_reading(store, use_it, monkeypatch)
    with sent(store) as statements:
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    assert 2 * ["WITH granted", "UPDATE idempotency_records"] == statements


def meddle_after_reading(store: SqlStore, meddle: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something happens once, between a claim's look at the row and its write."""
    assert callable(meddle)
    writer: Any = store._ready()[1]
    write, once = writer.write, threading.Lock()

    def write_later(*arguments: object, **options: object) -> object:
        if once.acquire(blocking=False):
            # By row lock: the owner gives up waiting for the row that this claim has.
            with suppress(StoreUnavailable):
                meddle()
        return write(*arguments, **options)

    monkeypatch.setattr(writer, "write", write_later)
