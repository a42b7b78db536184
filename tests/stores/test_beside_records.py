"""What a store keeps beside its records is apart from them, goes by itself or by a sweep, and survives lost replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import product
from typing import Any

import fakeredis
import pytest
import redis
from sqlalchemy import func, select

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.activity import HOUR, KEPT_SECONDS, MINUTE, UNREADABLE, merged
from flask_idempotency.engine.audit import AUDIT_KEPT_SECONDS, AuditEntry
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.model import State
from flask_idempotency.engine.quota import Drift, Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.activity import SOME, an_owner, counted
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    PAYLOAD,
    Kit,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
)
from flask_idempotency.testing.proxy import TcpProxy
from tests.backends import MakeStore, make_kept
from tests.forgiving import FORGIVING
from tests.lab.postgres import PostgresServer
from tests.sql_backends import make_tables, maria_database, sql_databases, sql_stores

__all__ = ["make_kept", "maria_database", "sql_databases", "sql_stores"]

OWNER = b"own"
UNREAD = {UNREADABLE: {"unreadable": 1}}
ENTRY = AuditEntry("completed", "quarantined", "ann", "the bank confirms it")


def keep_something(store: Any, tid: bytes | None = None) -> None:
    """One of each kind."""
    key = a_key(tid=tid)
    store.activity.add(OWNER, SOME, token=a_token())
    store.observations.observe(key, token=a_token(), fingerprint=FINGERPRINT, lease=LEASE, keep=KEEP, hold_lapsed=False)
    store.audit.append(key, ENTRY, token=a_token())


def test_no_list_count_or_quota_finds_what_is_kept_beside_records(make_kept: MakeStore, clock: FrozenClock) -> None:
    store: Any = make_kept(clock)
    key, token, quota = a_key(), a_token(), Quota(records=5)
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
    store.complete(key, token, PAYLOAD, keep=KEEP)

    def looks() -> list[object]:
        return [
            *(Kit(store, clock).walked(state, tid=key.tid) for state in State),
            store.ledger.usage(key.tid),
            store.ledger.reconcile(key.tid),
            store.recovery.counts().in_flight,
            store.data_keys.read_keys(key.tid).keys,
            len(list(store.responses.scan(limit=1000, tid=key.tid).answers)),
        ]

    before = looks()
    assert Drift() == before[4]
    for _ in range(3):
        keep_something(store, key.tid)

    assert before == looks()


def test_a_redis_with_activity_has_lost_no_data(redis_client: redis.Redis, clock: FrozenClock) -> None:
    with closing(RedisStore(redis_client, clock=clock)) as store:
        keep_something(store)
        store.data_loss.initialise()
        keep_something(store)

        assert not store.data_loss.status().losses
        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))


def test_everything_in_redis_has_a_time_to_live(redis_client: redis.Redis) -> None:
    with closing(RedisStore(redis_client)) as store:
        keep_something(store)
    left = {bytes(key): redis_client.pttl(key) / 1000 for key in redis_client.scan_iter(b"*")}
    by_letter = {key.split(b"}:")[1][:1]: seconds for key, seconds in left.items()}

    assert {b"t", b"b", b"o", b"h", b"y", b"u"} == set(by_letter)
    assert all(0 < seconds <= AUDIT_KEPT_SECONDS + 1 for seconds in left.values())
    buckets = sorted(seconds for key, seconds in left.items() if b"}:b:" in key)
    for seconds, length in zip(buckets, (MINUTE, HOUR), strict=True):
        assert KEPT_SECONDS[length] < seconds <= KEPT_SECONDS[length] + length
    assert LEASE + KEEP - 60 < by_letter[b"o"] <= LEASE + KEEP


@for_each("damage", ("text", "shape", "depth", "type"))
def test_a_damaged_bucket_in_redis_hides_no_other(redis_client: redis.Redis, clock: FrozenClock, damage: str) -> None:
    with closing(RedisStore(redis_client, clock=clock)) as store:
        owner = an_owner()
        bucket = layout.activity_bucket(owner, MINUTE, int(clock.now))
        for _ in range(2):
            store.activity.add(owner, SOME, token=a_token())
            clock.advance(MINUTE)
        if damage == "type":
            redis_client.set(bucket, b"")
        else:
            texts = {"text": b'{"new":oops}', "shape": b"[1]", "depth": b"[" * 100_000}
            redis_client.hset(bucket, b'"pay"', texts[damage])

        assert merged((UNREAD, SOME)) == counted(store, owner)


def test_a_damaged_observation_in_redis_is_corrupt(redis_client: redis.Redis) -> None:
    key = a_key()
    with closing(RedisStore(redis_client)) as store:
        redis_client.set(layout.observation(key), b"N 1 2 three")

        with pytest.raises(CorruptRecord):
            store.observations.observe(
                key, token=a_token(), fingerprint=FINGERPRINT, lease=LEASE, keep=KEEP, hold_lapsed=False
            )


def test_a_full_redis_refuses_activity_and_takes_an_audit_entry(redis_server: RedisServer) -> None:
    """Memory that is left is for records; a change by an operator must leave a trace all the same."""
    key = a_key()
    with redis.Redis.from_url(redis_server.url) as client, closing(RedisStore(redis_server.url)) as store:
        store.activity.add(OWNER, SOME, token=a_token())
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreUnavailable):
                store.activity.add(OWNER, SOME, token=a_token())
            store.audit.append(key, ENTRY, token=a_token())
        finally:
            client.config_set("maxmemory", before)

        assert 1 == len(store.audit.entries(key))


def rows(store: SqlStore) -> list[int]:
    """Of each table beside the records."""
    tables = schema.activity, schema.activity_tokens, schema.observations, schema.audit
    counting = [select(func.count()).select_from(table) for table in tables]
    return store.database.run(lambda connection: [connection.scalar(each) or 0 for each in counting])


@pytest.fixture(params=("sqlite", "postgres"))
def sql_store(request: pytest.FixtureRequest, clock: FrozenClock, tmp_path: Any) -> Iterator[SqlStore]:
    with ExitStack() as ends:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path / 'records.sqlite'}"
        else:
            server: PostgresServer = request.getfixturevalue("postgres_server")
            url = server.url(ends.enter_context(server.database()))
        make_tables(url)
        yield ends.enter_context(closing(SqlStore(Database(url), clock=clock)))


def test_a_sweep_removes_each_kind_when_its_time_is_over(sql_store: SqlStore, clock: FrozenClock) -> None:
    keep_something(sql_store)
    assert [2, 1, 1, 1] == rows(sql_store)
    assert 0 == sql_store.expiry.sweep(horizon=clock.now + 10**9, limit=100)

    def swept(horizon: float) -> int:
        total = 0
        while removed := sql_store.expiry.sweep(horizon=horizon, limit=1):
            assert removed == 1
            total += removed
        return total

    for seconds, left in (
        (600, [2, 0, 1, 1]),
        (LEASE + KEEP, [2, 0, 0, 1]),
        (KEPT_SECONDS[MINUTE] + MINUTE, [1, 0, 0, 1]),
        (KEPT_SECONDS[HOUR] + HOUR, [0, 0, 0, 1]),
        (AUDIT_KEPT_SECONDS, [0, 0, 0, 0]),
    ):
        began = FrozenClock().now
        clock.advance(began + seconds - clock.now)
        assert 0 == swept(clock.now - 1)
        assert 1 == swept(clock.now)
        assert left == rows(sql_store)


@for_each("damage", ('{"pay": [1]}', "[1]", "[" * 100_000, "oops"))
def test_a_damaged_bucket_in_a_database_hides_no_other(sql_store: SqlStore, clock: FrozenClock, damage: str) -> None:
    owner = an_owner()
    sql_store.activity.add(owner, SOME, token=a_token())
    damaged = schema.activity.update().values(counts=damage)
    sql_store.database.run(lambda connection: connection.execute(damaged))
    sql_store.activity.add(owner, SOME, token=a_token())
    clock.advance(MINUTE)
    sql_store.activity.add(owner, SOME, token=a_token())

    assert merged((UNREAD, SOME, SOME)) == counted(sql_store, owner)


DAMAGED_TEXTS = (b"", b"1 ", b"x [1]", b"1 " + b"t" * 16 + b"[" * 100_000, b"1 " + b"t" * 16 + b"[[],1,2,3,4,0,0]")


def test_a_damaged_change_in_redis_hides_no_other(redis_client: redis.Redis) -> None:
    key = a_key()
    with closing(RedisStore(redis_client)) as store:
        store.audit.append(key, ENTRY, token=a_token())
        for text in DAMAGED_TEXTS:
            redis_client.rpush(layout.audit_trail(key), text)

        found = store.audit.entries(key)

    # One is of the year 1970, and has expired.
    assert Counter(entry.verb for entry in found) == {"completed": 1, "unreadable": 4}


@for_each("damage", ({"actor": b"\xff"}, {"changed_at": "soon"}, {"changed_at": 10**18}))
def test_a_damaged_change_in_sqlite_hides_no_other(sql_stores: Any, clock: FrozenClock, damage: dict[str, Any]) -> None:
    """SQLite keeps values of any type in any column."""
    store, key = sql_stores.lend_file()(clock), a_key()
    names = ", ".join(f"{name} = :{name}" for name in damage)
    store.audit.append(key, ENTRY, token=a_token())
    store.database.run(
        lambda connection: connection.exec_driver_sql(
            f"UPDATE idempotency_audit SET {names} WHERE record_id = :rid",  # noqa: S608 - our own words
            {**damage, "rid": key.rid},
        )
    )
    store.audit.append(key, ENTRY, token=a_token())

    assert {"completed", "unreadable"} == {entry.verb for entry in store.audit.entries(key)}


AT = ("INSERT INTO idempotency_activity_tokens", "FOR UPDATE", "COMMIT")
LOSE: tuple[Callable[[TcpProxy], None], ...] = (TcpProxy.lose_request, TcpProxy.lose_reply)
TWICE = {endpoint: {name: 2 * number for name, number in counters.items()} for endpoint, counters in SOME.items()}


def test_a_lost_exchange_with_postgres_adds_no_count_twice(postgres_server: PostgresServer, postgres_url: str) -> None:
    make_tables(postgres_url)
    for at, lose in product(AT, LOSE):
        owner = an_owner()
        with TcpProxy(postgres_server.port, marker=at.encode()) as proxy:
            through = postgres_url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
            with closing(SqlStore(Database(through))) as store:
                store.activity.add(owner, SOME, token=a_token())
                token, failed = a_token(), 0
                lose(proxy)
                for _ in range(3):
                    try:
                        store.activity.add(owner, SOME, token=token)
                    except StoreUnavailable:
                        failed += 1

                assert failed < 3, (at, lose)
                assert [TWICE] * 2 == [counted(store, owner, length=length) for length in (MINUTE, HOUR)], (at, lose)


def test_a_lost_reply_of_redis_adds_no_count_twice(redis_client: redis.Redis, clock: FrozenClock) -> None:
    class Deaf(fakeredis.FakeRedis):
        lost = 0

        def execute_command(self, *arguments: Any, **options: Any) -> Any:
            answer = super().execute_command(*arguments, **options)  # type: ignore[no-untyped-call]
            if self.lost and str(arguments[0]).startswith("EVAL"):
                self.lost -= 1
                raise redis.ConnectionError("the reply was lost")
            return answer

    with Deaf() as client, closing(RedisStore(client, clock=clock, rules=FORGIVING)) as store:
        store.activity.add(OWNER, SOME, token=a_token())
        client.flushall()
        token = a_token()
        # The first script reads the time.
        for lost in (1, 2):
            client.lost = lost
            with pytest.raises(StoreUnavailable):
                store.activity.add(OWNER, SOME, token=token)
            client.lost = 0
        for _ in range(2):
            store.activity.add(OWNER, SOME, token=token)

        assert SOME == counted(store, OWNER)


def test_the_completed_records_of_redis_are_estimated_among_other_keys(redis_client: redis.Redis) -> None:
    with closing(RedisStore(redis_client, rules=FORGIVING)) as store:
        keys = [a_key() for _ in range(50)]
        for number, key in enumerate(keys):
            token = a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            if number % 5:
                store.complete(key, token, PAYLOAD, keep=KEEP)
        assert 40 == store.recovery.about_completed()

        record = redis_client.get(layout.keys(keys[1])[0])
        pipeline = redis_client.pipeline(transaction=False)
        for number in range(8000):
            pipeline.set(layout.keys(a_key())[0], record or b"")
            if number % 4 == 0:
                pipeline.set(f"of-the-application:{number}", "")
                pipeline.set(layout.observation(a_key()), "")
        pipeline.execute()
        estimated = store.recovery.about_completed()

    assert estimated == pytest.approx(8040, rel=0.1)


@for_each("analyzed", (False, True))
def test_the_completed_records_of_postgres_are_estimated(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, analyzed: bool
) -> None:
    """From what the planner knows. It does not know a table before its first VACUUM or ANALYZE."""
    monkeypatch.setattr("flask_idempotency.stores.sql.admin.janitor.COUNTED", 20)
    with ExitStack() as ends:
        url = postgres_server.url(ends.enter_context(postgres_server.database()))
        make_tables(url)
        store = ends.enter_context(closing(SqlStore(Database(url))))
        for number in range(60):
            key, token = a_key(), a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            if number % 3 == 0:
                store.quarantine(key, token, "view-crashed")
            elif number != 1:
                store.complete(key, token, PAYLOAD, keep=KEEP)
        if analyzed:
            store.database.run(lambda connection: connection.exec_driver_sql("ANALYZE idempotency_records"))

        assert store.recovery.about_completed() == (39 if analyzed else None)


def test_the_completed_records_of_sqlite_are_counted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, clock: FrozenClock
) -> None:
    make_tables(f"sqlite:///{tmp_path / 'records.sqlite'}")
    with closing(SqlStore(Database(f"sqlite:///{tmp_path / 'records.sqlite'}"), clock=clock)) as store:
        for number in range(30):
            key, token = a_key(), a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            if number == 0:
                store.release(key, token)
            elif number != 1:
                store.complete(key, token, PAYLOAD, keep=KEEP)

        assert 28 == store.recovery.about_completed()
        monkeypatch.setattr("flask_idempotency.stores.sql.admin.janitor.COUNTED", 10)
        assert 29 == store.recovery.about_completed()
