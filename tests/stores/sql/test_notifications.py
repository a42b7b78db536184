"""On PostgreSQL, a message wakes waiters in other processes when a claim ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import takewhile

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.orm import scoped_session, sessionmaker

from flask_idempotency import idempotent
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, Unknown
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.notifications import SqlNotifier
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.statements import CHANNEL
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.lab.pgbouncer import StartPgBouncer
from tests.lab.postgres import PostgresServer, StartPostgres
from tests.lab.programs import REDIS_KINDS
from tests.stores.owners import WRITES
from tests.stores.sql.conftest import OpenStore, by_every_lock, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent
from tests.stores.sql.shops import OpenShop, Shop
from tests.stores.waiters import Waiter, assert_a_forked_child_wakes_its_own, awaited, waiting
from tests.tooling.processes import DEADLINE_SECONDS, eventually

LISTENERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN flask_idempotency'"

SETTLEMENTS: dict[str, Callable[[SqlStore, SeenRecord, FrozenClock], object]] = {
    "complete": lambda store, seen, _: store.complete(seen.key, seen.record.token, PAYLOAD, keep=KEEP),
    "release": lambda store, seen, _: store.release(seen.key, seen.record.token),
    "quarantine": lambda store, seen, _: store.quarantine(seen.key, seen.record.token, "lost"),
    "force release": lambda store, seen, _: store.recovery.force_release(seen),
    "janitor": lambda store, seen, clock: expire(store, seen, clock),
    "claim": lambda store, seen, clock: claim_expired(store, seen, clock),
}


def expire(store: SqlStore, seen: SeenRecord, clock: FrozenClock) -> None:
    clock.advance(LEASE + 1)
    assert store.recovery.quarantine_expired(seen, horizon=clock.now)


def claim_expired(store: SqlStore, seen: SeenRecord, clock: FrozenClock) -> None:
    clock.advance(LEASE + 1)
    assert isinstance(store.claim(a_request(seen.key), token=a_token(), lease=LEASE), Unknown)


def plain(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture
def heard(records_url: str) -> Iterator[Callable[[], list[str]]]:
    """The messages on the channel so far."""
    with psycopg.connect(plain(records_url), autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")

        def messages() -> list[str]:
            with psycopg.connect(plain(records_url), autocommit=True) as other:
                other.execute(f"NOTIFY {CHANNEL}, 'end'")
            payloads = (notify.payload for notify in connection.notifies(timeout=DEADLINE_SECONDS))
            return list(takewhile(lambda payload: payload != "end", payloads))

        yield messages


@by_every_lock
def test_a_waiter_wakes_when_another_store_ends_the_claim(
    open_store: OpenStore, clock: FrozenClock, strategy: str
) -> None:
    """Two stores with their own engines, as in two processes. The waiter does not poll."""
    mine, other = open_store(strategy=strategy), open_store(strategy=strategy)
    with waiting(mine.notifier, a_key()):
        for how, settle in SETTLEMENTS.items():
            key, token, waiter = a_key(), a_token(), Waiter()
            granted(other.claim(awaited(key), token=token, lease=LEASE))
            with mine.notifier.subscribe([key], waiter.wake):
                settle(other, SeenRecord(key, found(other, key)), clock)
                assert waiter.is_woken(), how


@on_postgresql
@pytest.mark.parametrize("quota", (None, Quota(records=50)), ids=("uncounted", "counted"))
def test_the_end_of_a_claim_is_sent_once(
    open_store: OpenStore, clock: FrozenClock, heard: Callable[[], list[str]], quota: Quota | None
) -> None:
    """The message names only the record. A second end, by an operator or a late worker, sends no other."""
    store = open_store()
    for how, settle in SETTLEMENTS.items():
        key, token = a_key(), a_token()
        granted(store.claim(awaited(key), token=token, lease=LEASE, quota=quota))

        settle(store, SeenRecord(key, found(store, key)), clock)
        ended = store.read(key)
        if ended is not None:
            store.recovery.force_release(SeenRecord(key, ended))

        assert (how, [key.rid.hex()]) == (how, heard())


@on_postgresql
def test_a_claim_without_waiters_sends_no_message(open_store: OpenStore, heard: Callable[[], list[str]]) -> None:
    store = open_store()
    for write in WRITES.values():
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        write(store, key, token)  # type: ignore[arg-type]

    assert [] == heard()


@on_postgresql
def test_a_claim_with_waiters_sends_no_further_statement(open_store: OpenStore) -> None:
    store = open_store()
    counts = []
    for request in (a_request(a_key()), awaited(a_key())):
        token = a_token()
        granted(store.claim(request, token=token, lease=LEASE))
        with sent(store) as statements:
            store.complete(request.key, token, PAYLOAD, keep=KEEP)
        counts.append(list(statements))

    assert counts[0] == counts[1]
    assert 1 == len(counts[0])


@on_postgresql
def test_a_marked_and_renewed_claim_keeps_its_waiters(open_store: OpenStore, heard: Callable[[], list[str]]) -> None:
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(awaited(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    store.mark_point_of_no_return(key, token)
    store.renew(key, token, lease=2 * LEASE)
    failed = replace(PAYLOAD, status=500, success=False)
    store.complete(key, token, failed, keep=KEEP)

    assert [key.rid.hex()] == heard()
    assert failed == found(store, key).payload


@on_postgresql
def test_after_a_takeover_the_new_claim_decides(
    open_store: OpenStore, clock: FrozenClock, heard: Callable[[], list[str]]
) -> None:
    store = open_store()
    ends = []
    for first, second in ((True, False), (False, True)):
        for how in ("takeover", "reclaim"):
            key, tokens = a_key(), (a_token(), a_token())
            for token, waits in zip(tokens, (first, second), strict=True):
                request = replace(a_request(key, on_expiry=OnExpiry.TAKEOVER), notify_on_completion=waits)
                granted(store.claim(request, token=token, lease=LEASE))
                if token is tokens[0]:
                    if how == "reclaim":
                        store.release(key, token)
                        assert ([key.rid.hex()] if waits else []) == heard()
                    else:
                        clock.advance(LEASE + 1)
            store.complete(key, tokens[1], PAYLOAD, keep=KEEP)
            ends.append((second, heard() == [key.rid.hex()]))

    assert [(False, False)] * 2 + [(True, True)] * 2 == ends


@on_postgresql
def test_a_lost_owner_wakes_no_waiter(open_store: OpenStore, heard: Callable[[], list[str]]) -> None:
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with pytest.raises(Exception, match="another worker"):
        store.complete(key, a_token(), PAYLOAD, keep=KEEP)

    assert [] == heard()


@on_postgresql
def test_a_cut_connection_is_replaced(open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    """Messages in between are lost, so the new connection wakes each waiter: it reads its record."""
    caplog.set_level("INFO", "flask_idempotency")
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with waiting(store.notifier, key) as waiter:
        [pid] = listeners(store)
        end_session(store, pid)
        assert waiter.is_woken()
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()
    logged = [record.getMessage() for record in caplog.records if "notifications" in record.getMessage()]
    assert [True, False] == ["are interrupted" in text for text in logged]


@pytest.mark.slow
def test_the_listener_reconnects_after_a_restart(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    server.create_database("records")
    store = SqlStore(Database(server.url("records")))
    store.schema.upgrade()
    key, token = a_key(), a_token()
    with closing(store), waiting(store.notifier, key) as waiter:
        server.kill()
        assert eventually(lambda: store.notifier.disconnected)
        server.restart()
        assert waiter.is_woken()
        granted(store.claim(awaited(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()


@on_postgresql
def test_a_silent_connection_is_checked(open_store: OpenStore) -> None:
    """A message that arrives with the reply to the check is not lost."""
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    notifier = SqlNotifier(store.database, ping_after_seconds=0.0)
    with waiting(notifier, key) as waiter:
        assert eventually(lambda: store.database.run(was_checked))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert waiter.is_woken()
    notifier.close()


def was_checked(connection: Connection) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'SELECT 1'"
    return bool(connection.exec_driver_sql(query).scalar_one())


@on_postgresql
def test_one_connection_serves_all_waiters_until_it_is_idle(open_store: OpenStore) -> None:
    """The first waiter opens it. It is in no pool, and not the sessions' either."""
    store, one, other = open_store(), a_key(), a_key()
    store.read(one)
    assert [] == listeners(store)
    notifier = SqlNotifier(store.database, idle_seconds=0.0)
    for _ in range(2):
        with waiting(notifier, one), notifier.subscribe([other], print), notifier.subscribe([one], print):
            assert 1 == len(listeners(store))
            assert 0 == store.database.engine.pool.checkedout()  # type: ignore[attr-defined]
        assert eventually(lambda: not listeners(store))


@on_postgresql
def test_a_closed_store_closes_the_connection(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    with waiting(store.notifier, a_key()):
        pass
    assert 1 == len(listeners(other))
    store.close()
    assert eventually(lambda: not listeners(other))


def listeners(store: SqlStore) -> list[int]:
    def read(connection: Connection) -> list[int]:
        return list(connection.exec_driver_sql(LISTENERS).scalars())

    return store.database.run(read)


def end_session(store: SqlStore, pid: int) -> None:
    store.database.run(lambda connection: connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})").all())


@on_postgresql
def test_a_forked_child_has_its_own_connection(open_store: OpenStore) -> None:
    assert_a_forked_child_wakes_its_own(open_store())


def test_a_pooler_that_shares_sessions_leaves_waiters_to_poll(
    postgres_server: PostgresServer, start_pgbouncer: StartPgBouncer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found before LISTEN, which would stay on a session of other clients. The log says so once."""
    caplog.set_level("INFO", "flask_idempotency")
    pooler = start_pgbouncer(postgres_server)
    with closing(SqlStore(Database(pooler.url("postgres")))) as store:
        poll_twice(store, caplog)
        assert 0 == store.database.run(
            lambda connection: connection.exec_driver_sql("SELECT count(*) FROM pg_listening_channels()").scalar_one()
        )


@on_postgresql
def test_a_connection_that_hears_no_message_leaves_waiters_to_poll(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a pooler whose sharing the first check did not see."""
    caplog.set_level("INFO", "flask_idempotency")
    store = open_store()
    store.notifier = SqlNotifier(store.database, delivery_seconds=0.0)
    poll_twice(store, caplog)
    assert [] == listeners(store)


def poll_twice(store: SqlStore, caplog: pytest.LogCaptureFixture) -> None:
    woken: list[bool] = []
    for _ in range(2):
        with store.notifier.subscribe([a_key()], lambda: woken.append(True)):
            thread = store.notifier._thread
            if thread is not None:
                thread.join(DEADLINE_SECONDS)
                assert not thread.is_alive()
        # Look again, as after some minutes.
        assert not store.notifier._can_listen()
        store.notifier._retry_at = float("-inf")
    assert [] == woken
    assert 1 == caplog.text.count("PostgreSQL notifications do not arrive")
    assert not store.notifier.disconnected


def test_a_pooler_that_keeps_sessions_delivers(
    postgres_server: PostgresServer, start_pgbouncer: StartPgBouncer
) -> None:
    pooler = start_pgbouncer(postgres_server, pool_mode="session")
    with closing(SqlStore(Database(pooler.url("postgres")))) as store, waiting(store.notifier, a_key()):
        pass


@on_sqlite
def test_on_sqlite_waiters_poll(open_store: OpenStore) -> None:
    store = open_store()
    with store.notifier.subscribe([a_key()], print):
        assert store.notifier._thread is None


@on_postgresql
@pytest.mark.parametrize("tiered", (False, True), ids=("sql", "tiered"))
def test_a_duplicate_wakes_when_a_view_of_another_application_commits(
    open_: OpenShop, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiered: bool
) -> None:
    """The commit of the application's session sends the message. No waiter polls for hours."""
    monkeypatch.setattr("flask_idempotency.engine.waiting.FIRST_POLL_SECONDS", 3600.0)
    monkeypatch.setattr("flask_idempotency.engine.waiting.LAST_POLL_SECONDS", 3600.0)
    begun, go_on, looked, read = threading.Event(), threading.Event(), threading.Event(), SqlStore.read

    def look(self: SqlStore, key: StorageKey) -> Record | None:
        record = read(self, key)
        looked.set()
        return record

    monkeypatch.setattr(SqlStore, "read", look)
    config = {}
    if tiered:
        config = {"IDEMPOTENCY_REDIS_URL": request.getfixturevalue("redis_servers").get(REDIS_KINDS[0]).url}
    shops = open_(**config), open_(existing=True, **config)
    for shop in shops:

        @shop.view()
        @idempotent(in_flight="wait", wait=3 * DEADLINE_SECONDS)
        def pay(shop: Shop = shop) -> tuple[str, int]:
            shop.pay()
            begun.set()
            assert go_on.wait(DEADLINE_SECONDS)
            return "paid", 201

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shops[0].post)
        assert begun.wait(DEADLINE_SECONDS)
        second = pool.submit(shops[1].post)
        # The new connection wakes the waiter once. After that only a message does.
        assert looked.wait(DEADLINE_SECONDS)
        go_on.set()
        answers = first.result(DEADLINE_SECONDS), second.result(DEADLINE_SECONDS)

    assert [(201, "paid"), (201, "paid")] == [(answer.status_code, answer.text) for answer in answers]
    assert "true" == answers[1].headers["Idempotency-Replayed"]
    assert 1 == shops[0].payments()


@pytest.mark.slow
def test_a_prepared_transaction_sends_no_message(start_postgres: StartPostgres) -> None:
    """PostgreSQL cannot prepare a transaction that has sent one. Its waiters poll."""
    server = start_postgres("-c", "max_prepared_transactions=5")
    base = create_engine(server.url("postgres"))
    metadata.create_all(base)
    store = TransactionalSqlStore(Database(base), sessions=lambda: scoped_session(sessionmaker(base)))
    key, token = a_key(), a_token()
    granted(store.claim(awaited(key), token=token, lease=LEASE))
    with closing(store), base.connect() as connection, connection.begin_twophase() as transaction:
        store.transactions.complete(connection, key, token, PAYLOAD, KEEP, None, checked=False)
        transaction.prepare()
        transaction.commit()
    base.dispose()

    assert PAYLOAD == found(store, key).payload
    store.close()
