"""One tenant that asks for more than it may have costs the others nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, event, text

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import InFlight, OverQuota
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql.database import Database, TenantLock
from flask_idempotency.stores.sql.quota import MARGIN
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import a_key, granted
from tests.stores.sql.conftest import MakeEngine, OpenStore, by_every_lock
from tests.stores.sql.test_quota import FULL, ROOM, alone, ask

CROWD = 6
NEAR = Quota(records=MARGIN)


@pytest.fixture
def elsewhere(make_engine: MakeEngine) -> Iterator[Connection]:
    with make_engine().connect() as connection:
        yield connection


@by_every_lock
def test_who_is_full_is_refused_whoever_holds_the_tenant(
    open_store: OpenStore, elsewhere: Connection, strategy: str
) -> None:
    """What is committed suffices to refuse; and a key that is known is told as ever."""
    store, known = open_store(strategy=strategy), a_key()
    granted(ask(store, known.tid, FULL, key=known))
    alone(elsewhere, known.tid)

    assert isinstance(ask(store, known.tid, FULL), OverQuota)
    assert isinstance(ask(store, known.tid, FULL, key=known), InFlight)


@by_every_lock
def test_who_was_slower_for_the_same_key_is_not_refused(open_store: OpenStore, strategy: str) -> None:
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
def test_who_waits_for_a_tenant_keeps_no_connections_from_others(
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


def test_one_passes_and_one_is_told_to_come_again() -> None:
    """Tenants do not know of each other, and nobody is remembered who has gone."""
    turnstile = TenantLock()

    with turnstile.turn(b"one", timeout=0) as first, turnstile.turn(b"two", timeout=0) as other:
        with turnstile.turn(b"one", timeout=0) as second:
            assert (True, True, False) == (first, other, second)
        assert 2 == len(turnstile)

    assert 0 == len(turnstile)


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    """It was in there when its process was copied, and is not here to leave."""
    turnstile = TenantLock()

    with turnstile.turn(b"one", timeout=0):
        turnstile.after_fork()
        with turnstile.turn(b"one", timeout=0) as mine:
            assert mine

    assert 0 == len(turnstile)
