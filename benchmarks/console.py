"""Time what the console reads from a store with a million completed records: the parts of the overview, and pages of lists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

import redis
from sqlalchemy import create_engine, text

from benchmarks import report, sql_apps
from benchmarks.apps import ANSWER
from benchmarks.harness import Cores, pin
from benchmarks.report import Row, Section, at_most
from benchmarks.sql_apps import MISSING, POSTGRESQL, Database
from example_app.demo.servers import RedisServer
from flask_idempotency.engine.activity import HOUR, MINUTE
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, RequestInfo, State, StoredPayload
from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.stores.sql.database import Database as SqlDatabase
from flask_idempotency.stores.sql.store import SqlStore

RECORDS: Final = 1_000_000
TENANTS: Final = 50
SMALL: Final = 20
"""Records of one more tenant, which has few."""
QUARANTINED: Final = 3_000
IN_FLIGHT: Final = 2_000
ENDPOINTS: Final = 30
MINUTES: Final = 24 * 60
ROUNDS: Final = 9
AT_ONCE: Final = 5_000
ROWS_OF_A_PAGE: Final = 50
KEEP_SECONDS: Final = 24 * 3600
OWNER: Final = b"own"

Filled: TypeAlias = SqlStore | RedisStore

NOTE: Final = (
    "ms of the calls that the console makes, by one thread, on a store with so many completed records of 50 tenants, 3,000 "
    "quarantined and 2,000 in flight, and 24 hours in which each minute counted at each of 30 endpoints. The overview is the "
    "sum of the parts above it. `a later page` begins after 20 pages. The small tenant has 20 records."
)

COUNTERS: Final = {
    "new": 40,
    "replayed": 9,
    "conflict": 2,
    "mismatch": 1,
    "completed": 38,
    "released": 2,
    **{f"t:new:{slot}": 5 for slot in range(6, 14)},
    **{f"t:replayed:{slot}": 3 for slot in range(3)},
}
"""What one endpoint counts in a minute."""


def sections(database_url: str | None, cores: Cores, *, records: int = RECORDS, rounds: int = ROUNDS) -> list[Section]:
    rows: dict[str, dict[str, float]] = {}
    missing: list[Section] = []
    kinds: list[str] = []

    def measured(kind: str, store: Filled) -> None:
        kinds.append(kind)
        for name, call in parts(store).items():
            rows.setdefault(name, {})[kind] = timed(call, rounds=rounds)

    with _redis(cores) as url, closing(RedisStore(url, rules=RedisDataLossPolicy(after_loss="run"))) as store:
        store.data_loss.initialise()
        fill_redis(url, store, records)
        measured("Redis", store)
    with sql_apps.postgresql(database_url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
            missing.append(Section(f"The console on {POSTGRESQL}", MISSING))
        else:
            with closing(SqlStore(SqlDatabase(database.url))) as sql_store:
                fill_sql(database, sql_store, records)
                measured(POSTGRESQL, sql_store)
    overview = {kind: sum(rows[name].get(kind, 0.0) for name in OVERVIEW) for kind in kinds}
    shown = [Row(name, dict(cells)) for name, cells in rows.items()]
    at = max(number for number, row in enumerate(shown) if row.case in OVERVIEW) + 1
    verdicts = [at_most("≤ 300 ms", ms, report.OVERVIEW_MILLISECONDS) for ms in overview.values()]
    shown.insert(at, Row("the overview", dict(overview), verdicts))
    return [*missing, Section(f"The console over {records:,} completed records", NOTE, shown)]


OVERVIEW: Final = (
    "the time",
    "unfinished records",
    "completed records",
    "first quarantined",
    "activity of an hour",
    "task log",
    "data loss",
)
"""The parts of the overview. Its charts show an hour at first."""


def parts(store: Filled) -> dict[str, Callable[[], object]]:
    """Return the calls of each part, by its name."""
    recovery, activity = store.recovery, store.activity
    big, small = tenants()[0], tenants()[-1]

    def pages(tid: bytes | None, *, number: int = 1) -> bytes:
        """Read so many pages, or all but the last, and return where the next one begins."""
        begin = b""
        for _ in range(number):
            after = recovery.scan(State.COMPLETED, after=begin, limit=ROWS_OF_A_PAGE, tid=tid).after
            if after is None:
                break
            begin = after
        return begin

    def whole(tid: bytes) -> None:
        """Read pages until the tenant's records are found, as a page of the console does, or until the end."""
        after: bytes | None = b""
        found = 0
        while after is not None and found < SMALL:
            page = recovery.scan(State.COMPLETED, after=after, limit=ROWS_OF_A_PAGE, tid=tid)
            found, after = found + len(page.found), page.after

    later = {tid: pages(tid, number=20) for tid in (None, big)}
    data_loss: dict[str, Callable[[], object]] = {}
    if isinstance(store, RedisStore):
        data_loss = {"data loss": store.data_loss.status}
    return {
        "the time": store.task_log.now,
        "unfinished records": recovery.counts,
        "completed records": recovery.about_completed,
        "first quarantined": lambda: recovery.scan(State.QUARANTINED, limit=5),
        "activity of an hour": lambda: activity.read(OWNER, length=MINUTE, seconds=3600),
        "task log": store.task_log.reports,
        **data_loss,
        "activity of 24 hours, by hour": lambda: activity.read(OWNER, length=HOUR, seconds=86400),
        "activity of 24 hours, by minute": lambda: activity.read(OWNER, length=MINUTE, seconds=86400),
        "a page of quarantined": lambda: recovery.scan(State.QUARANTINED, limit=ROWS_OF_A_PAGE),
        "a page of completed": lambda: pages(None),
        "… a later page": lambda: recovery.scan(State.COMPLETED, after=later[None], limit=ROWS_OF_A_PAGE),
        "a page of a tenant": lambda: pages(big),
        "… a later page of it": lambda: recovery.scan(State.COMPLETED, after=later[big], limit=ROWS_OF_A_PAGE, tid=big),
        "a page of a small tenant": lambda: pages(small),
        "… all of its records": lambda: whole(small),
    }


def timed(call: Callable[[], object], *, rounds: int) -> float:
    """Return the median of its times in ms, after a first call that is not counted."""
    call()
    taken = []
    for _ in range(rounds):
        began = perf_counter()
        call()
        taken.append((perf_counter() - began) * 1000)
    return median(taken)


def tenants() -> list[bytes]:
    """Return the ids of the tenants. The last one is small. They are the same in each run, in random partitions."""
    return [(number * 7919 % 65521).to_bytes(2, "big") + number.to_bytes(14, "big") for number in range(TENANTS + 1)]


def fill_redis(url: str, store: RedisStore, records: int) -> None:
    """Complete one record of each tenant as the store does, and copy it under other names."""
    with redis.Redis.from_url(url) as client:
        for tid, number in _shares(records):
            key = completed(store, tid)
            value = client.get(layout.keys(key)[0])
            left = client.pttl(layout.keys(key)[0])
            for begin in range(1, number, AT_ONCE):
                pipeline = client.pipeline(transaction=False)
                for _ in range(min(AT_ONCE, number - begin)):
                    pipeline.set(layout.keys(StorageKey(os.urandom(32), tid))[0], value or b"", px=left)
                pipeline.execute()
    fill_rest(store, lambda clock: RedisStore(url, rules=RedisDataLossPolicy(after_loss="run"), clock=clock))


COPIES: Final = text(
    "INSERT INTO idempotency_records SELECT copied.* FROM idempotency_records AS original,"
    " generate_series(2, :number) AS copies (number), LATERAL jsonb_populate_record(original, jsonb_build_object("
    "'record_id', '\\x' || encode(sha256(original.record_id || number::text::bytea), 'hex'))) AS copied"
    " WHERE original.record_id = :original"
)
"""In FROM, so that PostgreSQL makes each copy once, and not once for each of its columns."""


def fill_sql(database: Database, store: SqlStore, records: int) -> None:
    """Complete one record of each tenant as the store does, and copy its row under other names."""
    engine = create_engine(database.url)
    try:
        for tid, number in _shares(records):
            key = completed(store, tid)
            with engine.begin() as connection:
                connection.execute(COPIES, {"number": number, "original": key.rid})
        fill_rest(store, lambda clock: SqlStore(SqlDatabase(database.url), clock=clock))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # As autovacuum has done by the time that so many records have come in.
            connection.exec_driver_sql("VACUUM ANALYZE")
    finally:
        engine.dispose()


def fill_rest(store: Filled, by_clock: Callable[[Clock], Filled]) -> None:
    """Add the records that are not completed, what a day counted, and the log of a janitor."""
    everybody = tenants()[:-1]
    for number in range(QUARANTINED + IN_FLIGHT):
        key, token = claimed(store, everybody[number % TENANTS])
        if number < QUARANTINED:
            store.quarantine(key, token, "view-crashed")
    for task in ("reap", "expire", "rotate", "reconcile", "heartbeat"):
        store.task_log.report(task, '{"finished": true}')
    now = time.time()
    moment = now
    with closing(by_clock(lambda: moment)) as earlier:
        counts = {f"shop.endpoint_{number}": COUNTERS for number in range(ENDPOINTS)}
        for minute in range(MINUTES):
            moment = now - 60 * minute
            earlier.activity.add(OWNER, counts, token=os.urandom(16))


def _shares(records: int) -> list[tuple[bytes, int]]:
    *others, small = tenants()
    return [*((tid, (records - SMALL) // TENANTS) for tid in others), (small, SMALL)]


def completed(store: Filled, tid: bytes) -> StorageKey:
    key, token = claimed(store, tid)
    store.complete(key, token, StoredPayload(ANSWER, 201, True, len(ANSWER)), keep=KEEP_SECONDS)
    return key


def claimed(store: Filled, tid: bytes) -> tuple[StorageKey, bytes]:
    key, token = StorageKey(os.urandom(32), tid), os.urandom(16)
    info = RequestInfo(f"tenant-{tid[-1]}", "alice", "POST", "payments.create")
    request = ClaimRequest(key, b"\1" + bytes(16), OnExpiry.QUARANTINE, info)
    assert isinstance(store.claim(request, token=token, lease=3600), Grant)
    return key, token


@contextmanager
def _redis(cores: Cores) -> Iterator[str]:
    with RedisServer() as server:
        pin(server.pid, cores.store)
        yield server.url
