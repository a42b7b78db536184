"""What records take: memory in Redis, time among a million keys, and the cost of removing them when they expire."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from time import perf_counter_ns
from typing import Any, Final
from uuid import uuid4

import redis
from sqlalchemy import Engine, create_engine, func, select

from benchmarks import report, sql_apps
from benchmarks.apps import ANSWER, APP, LIST_ANSWER, LOCATION, PRINCIPAL, SECRET, compressed, ours
from benchmarks.harness import Cores, pin, quantile
from benchmarks.report import Row, Section, Verdict, at_most
from benchmarks.server_cost import RECORDS, kept_keys
from benchmarks.sql_apps import MISSING, POSTGRESQL, Database
from example_app.demo.servers import RedisServer
from flask_idempotency.assembly import build_store
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.fingerprint import SIZE
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, SealContext, StoredPayload, StoredResponse
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.maintenance.janitor import Batcher, expire
from flask_idempotency.settings import Settings
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.database import Database as SqlDatabase
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.web.janitor import BATCHES

MEMORY_NOTE = (
    "Bytes. `memory` is MEMORY USAGE of all Redis keys of one request, `value` their contents. `to` is the compressed size as "
    "a part of the size, by level 1 of zlib."
)


def memory_section(client: redis.Redis, url: str) -> Section:
    rows = [
        _overhead(),
        _record("a charge", "/payments", ANSWER, client, url),
        _record("a list of payments", "/lists", LIST_ANSWER, client, url),
    ]
    return Section("Memory", MEMORY_NOTE, rows)


def _overhead() -> Row:
    metadata = (("Content-Type", "application/json"), ("Location", LOCATION))
    result = StoredResponse(status=201, metadata=metadata, body=ANSWER)
    plain = len("201") + sum(len(name) + len(value) for name, value in metadata) + len(ANSWER)
    overhead = len(EnvelopeCodec(compression=None).wrap(result)) - plain
    verdict = at_most("≤ 64 B on top", overhead, report.OVERHEAD_BYTES)
    return Row("a stored answer before compression", {"answer": plain, "on top": overhead}, [verdict])


def _record(name: str, path: str, answer: bytes, client: redis.Redis, url: str) -> Row:
    keys = kept_keys(client, ours(url), path=path, records=RECORDS)
    used = sum(client.memory_usage(key, samples=0) or 0 for key in keys) / RECORDS
    cells: dict[str, float | str] = {
        "answer": len(answer),
        "to": f"{compressed(answer):.0%}",
        "keys": len(keys) / RECORDS,
        "value": sum(_held(client, key) for key in keys) / RECORDS,
        "memory": used,
    }
    return Row(name, cells, [at_most(f"≤ {report.RECORD_BYTES:,.0f} B", used, report.RECORD_BYTES)])


def _held(client: redis.Redis, key: bytes) -> int:
    """Return the bytes of a value. The store has hashes and strings."""
    if client.type(key) == b"hash":
        return sum(len(field) + len(value) for field, value in client.hgetall(key).items())
    return int(client.strlen(key))


LEVELS: Final = (0, 1_000, 10_000, 100_000, 1_000_000)
GROWTH_ROUNDS = 20
CLAIMS_A_ROUND = 250
KEEP_SECONDS = 24 * 3600

SPREAD_SECONDS = 23 * 3600
"""The full store's requests ended within this time: every bucket of the ledger has some, and no record has expired."""

MOST_KEYS: Final = LEVELS[-1]
QUOTA = Quota(records=10 * MOST_KEYS, bytes=10**15, in_flight=MOST_KEYS, new_keys=NewKeys(10 * MOST_KEYS, 3600))

GROWTH_NOTE = (
    "µs of `claim` with every limit of a quota on the store itself, new keys of one tenant, interleaved rounds on an empty and "
    "a filled server. The records of the filled server were claimed and completed one by one, over a day of its clock."
)


@dataclass(frozen=True, slots=True)
class Level:
    """The time of a claim in µs among so many live keys, and in an empty store in the same rounds."""

    keys: int
    p50: float
    p99: float
    empty_p50: float
    empty_p99: float


def growth(cores: Cores, *, levels: Sequence[int] = LEVELS, rounds: int = GROWTH_ROUNDS) -> tuple[list[Level], Section]:
    """Time a claim among more and more live keys of one tenant, beside a claim in an empty store."""
    found: list[Level] = []
    with ExitStack() as running:
        empty = running.enter_context(_redis(cores))
        full = running.enter_context(_redis(cores))
        stores = {url: build_store(url, memory={"after_loss": "run"}) for url in (empty, full)}
        for before, keys in zip((0, *levels), levels, strict=False):
            fill(full, before, keys, most=max(levels))
            taken: dict[str, list[float]] = {empty: [], full: []}
            for url in (empty, full):
                _redis_claims(stores[url])
            for _ in range(rounds):
                for url in random.sample([empty, full], 2):
                    taken[url] += _redis_claims(stores[url])
            times = [quantile(taken[url], part) for url in (full, empty) for part in (0.5, 0.99)]
            found.append(Level(keys, *times))
        used, ledger = _sizes(full)
    rows = [Row(f"{level.keys:,} keys", *_level_cells(level)) for level in found]
    rows.append(Row("the tenant's ledger", {"bytes": ledger}, [at_most("< 4 KB", ledger, report.LEDGER_BYTES)]))
    rows.append(Row("the filled server", {"MB": used / 1e6}))
    return found, Section("Claims among live keys", GROWTH_NOTE, rows)


def _level_cells(level: Level) -> tuple[dict[str, float | str], list[Verdict]]:
    ratio = level.p99 / level.empty_p99
    cells: dict[str, float | str] = {
        "p50": level.p50,
        "p99": level.p99,
        "p50 × empty": level.p50 / level.empty_p50,
        "p99 × empty": ratio,
    }
    return cells, [at_most("p99 ≤ 2 × empty", ratio, report.FULL_TO_EMPTY)] if level.keys else []


def fill(url: str, start: int, end: int, *, most: int) -> None:
    """Write the live records of one tenant with these numbers. Their times spread over a day, as those of `most` records."""
    identity, scope = Identity(SECRET.encode()), Scope(APP, tenant=None, principal=PRINCIPAL)
    began, number = time.time() - SPREAD_SECONDS, start
    store = RedisStore(
        url, rules=RedisDataLossPolicy(after_loss="run"), clock=lambda: began + SPREAD_SECONDS * number / most
    )
    payload = EnvelopeCodec().seal(StoredResponse(201, body=ANSWER), _UNBOUND)
    for number in range(start, end):
        key, token = identity.storage_key(scope, str(number)), os.urandom(16)
        request = ClaimRequest(key=key, fingerprint=os.urandom(SIZE), on_expiry=OnExpiry.QUARANTINE)
        assert isinstance(store.claim(request, token=token, lease=30, quota=QUOTA), Grant)
        store.complete(key, token, payload, keep=KEEP_SECONDS)
    store.close()


def _sizes(url: str) -> tuple[int, int]:
    """Return the memory of the server, and of the tenant's ledger."""
    with redis.Redis.from_url(url) as client:
        name = layout.tenant_quota(Identity(SECRET.encode()).tenant_id(APP, None))
        return int(client.info("memory")["used_memory"]), int(client.memory_usage(name, samples=0) or 0)


_UNBOUND = SealContext(StorageKey(b"", b""), b"", 0, b"")
"""Without encryption a payload opens for any key."""


def _redis_claims(store: Store) -> list[float]:
    # The tenant of the records: these claims must share what a million keys share.
    identity, scope = Identity(SECRET.encode()), Scope(APP, tenant=None, principal=PRINCIPAL)
    taken = []
    for _ in range(CLAIMS_A_ROUND):
        key, token = identity.storage_key(scope, str(uuid4())), os.urandom(16)
        request = ClaimRequest(key=key, fingerprint=os.urandom(SIZE), on_expiry=OnExpiry.QUARANTINE)
        began = perf_counter_ns()
        outcome = store.claim(request, token=token, lease=30, quota=QUOTA)
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Grant)
        store.release(key, token)
    return taken


@contextmanager
def _redis(cores: Cores) -> Iterator[str]:
    with RedisServer() as server:
        pin(server.pid, cores.store)
        yield server.url


ROWS: Final = 200_000
ROUND_SECONDS: Final = 1.0
FINALS_A_SECOND: Final = 2_000
KEPT_UP_SECONDS: Final = 15
AT_ONCE: Final = 5_000
PAYLOAD: Final = StoredPayload(ANSWER, 201, True, len(ANSWER))

REMOVAL_NOTE: Final = (
    "µs of `claim` on the store itself by one thread, each followed by `complete`, while another process runs the task at its "
    "default pace, and while it rests: rounds of a second in turns, until no expired record is left."
)
PACE_NOTE: Final = (
    f"Every second {FINALS_A_SECOND:,} expired records come in, and the task starts again at its default pace. The table shows "
    "how many are left when it ends, at first and at last."
)


def expiry_sections(url: str | None, cores: Cores, *, rows: int, seconds: int = KEPT_UP_SECONDS) -> list[Section]:
    found: list[tuple[list[Row], list[Row]]] = []
    missing: list[Section] = []
    with sql_apps.postgresql(url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
            missing = [Section(f"Removal from {POSTGRESQL}", MISSING)]
        else:
            found.append(_both(database, cores, rows=rows, seconds=seconds))
    with sql_apps.sqlite() as file:
        found.append(_both(file, cores, rows=rows, seconds=seconds))
    removal, pace = ([row for each in found for row in each[which]] for which in (0, 1))
    return [
        *missing,
        Section(f"Removal of {rows:,} records beside claims", REMOVAL_NOTE, removal),
        Section("Removal beside what comes in", PACE_NOTE, pace),
    ]


def _both(database: Database, cores: Cores, *, rows: int, seconds: int) -> tuple[list[Row], list[Row]]:
    engine = create_engine(database.url)
    store = SqlStore(SqlDatabase(database.url))
    try:
        with _janitor(database.url, cores) as janitor:
            return [_removal(database, engine, store, janitor, rows)], [_pace(database, engine, janitor, seconds)]
    finally:
        store.close()
        engine.dispose()


def _removal(database: Database, engine: Engine, store: SqlStore, janitor: _Janitor, rows: int) -> Row:
    for already in range(0, rows, AT_ONCE):
        put_finals(engine, min(AT_ONCE, rows - already))
    if database.kind == POSTGRESQL:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE idempotency_records")
    resting: list[float] = []
    removing: list[float] = []
    removed, spent = 0, 0.0
    _sql_claims(store, ROUND_SECONDS)  # warms up
    while True:
        resting += _sql_claims(store, ROUND_SECONDS)
        janitor.begin(ROUND_SECONDS)
        removing += _sql_claims(store, ROUND_SECONDS)
        batch = janitor.ended()
        removed, spent = removed + batch.removed, spent + batch.seconds
        if batch.finished:
            break
    ratio = quantile(removing, 0.99) / quantile(resting, 0.99)
    cells = {
        "median": quantile(resting, 0.5),
        "p99": quantile(resting, 0.99),
        "median, removing": quantile(removing, 0.5),
        "p99, removing": quantile(removing, 0.99),
        "× p99": ratio,
        "worst, removing": max(removing),
        "removed": removed,
        "a second": removed / spent,
        "left": backlog(engine),
    }
    verdicts = [at_most("all", backlog(engine), 0)]
    if database.kind == POSTGRESQL:
        # SQLite has one writer at a time, so there is no budget for it.
        verdicts.append(at_most("p99 ≤ 2 × resting", ratio, report.REMOVING_TO_RESTING))
    return Row(database.kind, cells, verdicts)


def _pace(database: Database, engine: Engine, janitor: _Janitor, seconds: int) -> Row:
    left: list[int] = []
    took: list[float] = []
    late = 0.0
    for _ in range(seconds):
        due = time.monotonic() + 1
        janitor.begin(0.8)
        put_finals(engine, FINALS_A_SECOND)
        took.append(janitor.ended().seconds)
        left.append(backlog(engine))
        late = max(late, time.monotonic() - due)
        time.sleep(max(due - time.monotonic(), 0))
    third = max(seconds // 3, 1)
    first, last = max(left[:third]), max(left[-third:])
    cells = {"at first": first, "at last": last, "s of each, most": max(took), "s late, most": max(late, 0.0)}
    # Records that come in at the end of a task are left for the next one.
    verdict = at_most("does not grow", float(last), float(first + FINALS_A_SECOND))
    return Row(f"{database.kind}, {FINALS_A_SECOND:,} a second", cells, [verdict])


def put_finals(engine: Engine, number: int) -> None:
    """Insert so many expired records."""
    now = time.time_ns() // 1000
    row: dict[str, Any] = {
        "tenant_id": bytes(16),
        "state": schema.COMPLETED,
        "token": bytes(16),
        "fence": 1,
        "attempt": 1,
        "fingerprint": bytes(17),
        "on_expiry": schema.QUARANTINE,
        "tenant": "acme",
        "principal": "alice",
        "method": "POST",
        "endpoint": "payments.create",
        "requested_at": now - 2_000_000,
        "completed_at": now - 1_500_000,
        "status": 201,
        "response_size": len(ANSWER),
        "response": ANSWER,
        "in_quota": 0,
    }
    rows = [{**row, "record_id": os.urandom(32), "expires_at": now - 1_000_000 + each} for each in range(number)]
    with engine.begin() as connection:
        connection.execute(schema.records.insert(), rows)


def backlog(engine: Engine) -> int:
    """Count the expired records that the store still has."""
    over = select(func.count()).select_from(schema.records)
    over = over.where(schema.records.c.expires_at <= time.time_ns() // 1000)
    with engine.connect() as connection:
        return int(connection.execute(over).scalar_one())


def _sql_claims(store: SqlStore, seconds: float) -> list[float]:
    taken = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        key, token = StorageKey(os.urandom(32), bytes(16)), os.urandom(16)
        request = ClaimRequest(key, b"\1" + bytes(16), OnExpiry.QUARANTINE)
        began = perf_counter_ns()
        outcome = store.claim(request, token=token, lease=30)
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Grant)
        store.complete(key, token, PAYLOAD, keep=86_400)
    return taken


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one run of the task removed."""

    removed: int
    seconds: float
    finished: bool


class _Janitor:
    """The janitor in a separate process, as in production: it does not share the interpreter of the timed claims."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def begin(self, seconds: float) -> None:
        self._pipe.send(seconds)

    def ended(self) -> _Batch:
        batch: _Batch = self._pipe.recv()
        return batch


@contextmanager
def _janitor(url: str, cores: Cores) -> Iterator[_Janitor]:
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_run, args=(its, url, cores), daemon=True)
    process.start()
    try:
        ours.recv()
        yield _Janitor(ours)
    finally:
        ours.send(None)
        process.join()


def _run(pipe: Pipe, url: str, cores: Cores) -> None:
    pin(0, cores.load)
    store = SqlStore(SqlDatabase(url))
    store.task_log.now()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        drain = Batcher(batch=BATCHES["expire"], budget=seconds, rate=_default_rate())
        began = time.monotonic()
        did = expire(store.expiry, horizon=store.task_log.now(), drain=drain)
        pipe.send(_Batch(did.removed, time.monotonic() - began, did.finished))
    store.close()


def _default_rate() -> float:
    rate: Any = Settings.__dataclass_fields__["expire_rate"].default
    return float(rate)
