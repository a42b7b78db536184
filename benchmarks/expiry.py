"""What removing records costs those who claim meanwhile, and whether it keeps up with what comes in."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from time import perf_counter_ns
from typing import Any, Final

from sqlalchemy import Engine, create_engine, func, select

from benchmarks import budgets, databases
from benchmarks.budgets import at_most
from benchmarks.databases import MISSING, POSTGRESQL, Database
from benchmarks.machine import Cores, pin
from benchmarks.payloads import ANSWER
from benchmarks.rounds import quantile
from benchmarks.table import Row, Section
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, ClaimRequest, OnLapse, Payload
from flask_idempotency.maintenance.janitor import Drain, expire
from flask_idempotency.settings import Settings
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.database import Database as RecordsDatabase
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.web.janitor import BATCHES

ROWS: Final = 200_000
ROUND_SECONDS: Final = 1.0
FINALS_A_SECOND: Final = 2_000
KEPT_UP_SECONDS: Final = 15
AT_ONCE: Final = 5_000
PAYLOAD: Final = Payload(ANSWER, 201, True, len(ANSWER))

REMOVAL_NOTE: Final = (
    "µs of `claim` on the store itself by one thread, each followed by `complete`, while another process runs the chore at "
    "its default pace, and while it rests: rounds of a second in turns, until nothing is left to remove."
)
PACE_NOTE: Final = (
    f"Every second {FINALS_A_SECOND:,} records that are over come in, and the chore is begun anew at its default pace: so "
    "many are left when it has ended, at first and at last."
)


def sections(url: str | None, cores: Cores, *, rows: int, seconds: int = KEPT_UP_SECONDS) -> list[Section]:
    found: list[tuple[list[Row], list[Row]]] = []
    missing: list[Section] = []
    with databases.postgresql(url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
            missing = [Section(f"Removal from {POSTGRESQL}", MISSING)]
        else:
            found.append(_both(database, cores, rows=rows, seconds=seconds))
    with databases.sqlite() as file:
        found.append(_both(file, cores, rows=rows, seconds=seconds))
    removal, pace = ([row for each in found for row in each[which]] for which in (0, 1))
    return [
        *missing,
        Section(f"Removal of {rows:,} records beside claims", REMOVAL_NOTE, removal),
        Section("Removal beside what comes in", PACE_NOTE, pace),
    ]


def _both(database: Database, cores: Cores, *, rows: int, seconds: int) -> tuple[list[Row], list[Row]]:
    engine = create_engine(database.url)
    store = SqlStore(RecordsDatabase(database.url))
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
    _claims(store, ROUND_SECONDS)  # warm
    while True:
        resting += _claims(store, ROUND_SECONDS)
        janitor.begin(ROUND_SECONDS)
        removing += _claims(store, ROUND_SECONDS)
        told = janitor.ended()
        removed, spent = removed + told.removed, spent + told.seconds
        if told.finished:
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
        # A file has one writer at a time: there it is a measurement, and no budget.
        verdicts.append(at_most("p99 ≤ 2 × resting", ratio, budgets.REMOVING_TO_RESTING))
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
    # What comes in while the chore is at its end is left for the next.
    verdict = at_most("does not grow", float(last), float(first + FINALS_A_SECOND))
    return Row(f"{database.kind}, {FINALS_A_SECOND:,} a second", cells, [verdict])


def put_finals(engine: Engine, number: int) -> None:
    """So many records whose lives have ended."""
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
    """How many are over and there."""
    over = select(func.count()).select_from(schema.records)
    over = over.where(schema.records.c.expires_at <= time.time_ns() // 1000)
    with engine.connect() as connection:
        return int(connection.execute(over).scalar_one())


def _claims(store: SqlStore, seconds: float) -> list[float]:
    taken = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        key, token = StorageKey(os.urandom(32), bytes(16)), os.urandom(16)
        request = ClaimRequest(key, b"\1" + bytes(16), OnLapse.QUARANTINE)
        began = perf_counter_ns()
        outcome = store.claim(request, token=token, lease=30)
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Claimed)
        store.complete(key, token, PAYLOAD, keep=86_400)
    return taken


@dataclass(frozen=True, slots=True)
class _Told:
    removed: int
    seconds: float
    finished: bool


class _Janitor:
    """A process of its own, as a janitor is: it does not share the interpreter of those who are timed."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def begin(self, seconds: float) -> None:
        self._pipe.send(seconds)

    def ended(self) -> _Told:
        told: _Told = self._pipe.recv()
        return told


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
    store = SqlStore(RecordsDatabase(url))
    store.chores.now()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        drain = Drain(batch=BATCHES["expire"], budget=seconds, rate=_default_rate())
        began = time.monotonic()
        did = expire(store.expiry, horizon=store.chores.now(), drain=drain)
        pipe.send(_Told(did.removed, time.monotonic() - began, did.finished))
    store.close()


def _default_rate() -> float:
    rate: Any = Settings.__dataclass_fields__["expire_rate"].default
    return float(rate)
