"""Records in SQL, in one process: what a request takes, path by path, beside the same statements written by hand."""

from __future__ import annotations

from statistics import median
from typing import TypeAlias

import redis

from benchmarks import budgets
from benchmarks.budgets import Verdict, at_most
from benchmarks.cases import BARE, FIRST, NO_KEY, REPLAY
from benchmarks.databases import Database
from benchmarks.rounds import Timing, measure
from benchmarks.sql_cases import BUSINESS, FLOORS, TIERED, TRANSACTIONAL, Path, sql_cases
from benchmarks.table import Row, Section

NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds; `cpu` is this thread's share, without the server's and "
    "without what it waits for.\n`+ cpu` is over bare Flask, and for transactional effects over the business alone. "
    "`× floor` is to the same statements by hand;\nfor a tiered replay to one GET by hand, and with its Redis gone to a "
    "replay without any Redis."
)

Timings: TypeAlias = dict[Path, Timing]


def section(database: Database, client: redis.Redis, redis_url: str, *, rounds: int, requests: int) -> Section:
    with sql_cases(database, client, redis_url) as cases:
        measured = measure([case for case, _ in cases], rounds=rounds, requests=requests)
    timings = {(timing.case.app, timing.case.path): timing for timing in measured}
    note = f"{database.about}.\n{NOTE}"
    return Section(f"Records in {database.kind}", note, [_row(timing, timings) for timing in measured])


def _row(timing: Timing, timings: Timings) -> Row:
    path = timing.case.app, timing.case.path
    floor = timings[FLOORS[path]] if path in FLOORS else None
    added = timing.processor_added_to(_base(path, timings))
    cells: dict[str, float | str] = {
        "median": timing.typical,
        "cpu": median(timing.processor),
        "+ cpu": added,
        "p99": timing.quantile(0.99),
        "× bare": timing.ratio_to(timings[BARE, NO_KEY]),
    }
    if floor is not None:
        cells["× floor"] = timing.ratio_to(floor)
        cells["cpu × floor"] = timing.processor_ratio_to(floor)
    return Row(f"{timing.case.app}: {timing.case.path}", cells, _verdicts(path, added))


def _base(path: Path, timings: Timings) -> Timing:
    rows = path in ((TRANSACTIONAL, FIRST), (TIERED, FIRST))
    return timings[BUSINESS if rows else BARE, NO_KEY]


def _verdicts(path: Path, added: float) -> list[Verdict]:
    app, what = path
    if path not in FLOORS:
        return []
    if what == FIRST:
        return [at_most("≤ +350 µs cpu", added, budgets.SQL_FIRST_ADDED_CPU)]
    if what == REPLAY and app != TIERED:  # that one does not ask SQL
        return [at_most("≤ +140 µs cpu", added, budgets.SQL_REPLAY_ADDED_CPU)]
    return []
