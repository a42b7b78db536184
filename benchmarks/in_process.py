"""In one process: what a request takes, path by path, beside bare Flask and the floor written by hand."""

from __future__ import annotations

from statistics import median
from typing import TypeAlias

import redis

from benchmarks import budgets
from benchmarks.budgets import Verdict, at_most
from benchmarks.cases import BARE, BY_HAND, FIRST, GET, MISMATCH, NO_KEY, OURS_MEMORY, REPLAY, all_cases
from benchmarks.rounds import Timing, measure
from benchmarks.table import Row, Section

NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds; `cpu` is this process's share, and hardly feels what "
    "else the machine does.\nRatios and differences are of medians within each round, and then the median of those."
)

Timings: TypeAlias = dict[tuple[str, str], Timing]


def section(client: redis.Redis, url: str, *, rounds: int, requests: int) -> Section:
    with all_cases(client, url) as cases:
        measured = measure(cases, rounds=rounds, requests=requests)
    timings = {(timing.case.app, timing.case.path): timing for timing in measured}
    return Section("Requests in one process", NOTE, [_row(timing, timings) for timing in measured])


def _row(timing: Timing, timings: Timings) -> Row:
    bare, floor = _bare(timing, timings), _floor(timing, timings)
    cells: dict[str, float | str] = {
        "median": timing.typical,
        "cpu": median(timing.processor),
        "p99": timing.quantile(0.99),
        "+ bare": timing.added_to(bare),
        "× bare": timing.ratio_to(bare),
    }
    if floor is not None:
        cells["× by hand"] = timing.ratio_to(floor)
    return Row(f"{timing.case.app}: {timing.case.path}", cells, _verdicts(timing, bare, floor))


def _bare(timing: Timing, timings: Timings) -> Timing:
    return timings[BARE, GET if timing.case.path == GET else NO_KEY]


def _floor(timing: Timing, timings: Timings) -> Timing | None:
    """The hand-written case with the same round trips. A mismatch is read like a replay."""
    if timing.case.app in (BARE, BY_HAND):
        return None
    return timings[BY_HAND, REPLAY if timing.case.path == MISMATCH else timing.case.path]


def _verdicts(timing: Timing, bare: Timing, floor: Timing | None) -> list[Verdict]:
    if floor is None:
        return []
    path, p99 = timing.case.path, timing.quantile(0.99)
    if path in (GET, NO_KEY):
        return [at_most("< 10 µs added", timing.added_to(bare), budgets.ADDED_MICROSECONDS)]
    if timing.case.app == OURS_MEMORY:
        return []  # stands there to show our own share: no round trip hides it
    if path == FIRST:
        return [at_most("≤ 1.25 × by hand", timing.ratio_to(floor), budgets.FIRST_TO_FLOOR)]
    if path == REPLAY:
        return [
            at_most("≤ 1.25 × by hand", timing.ratio_to(floor), budgets.REPLAY_TO_FLOOR),
            at_most("p99 < 2 ms", p99, budgets.REPLAY_P99_MICROSECONDS),
        ]
    return [at_most("p99 < 5 ms", p99, budgets.REFUSAL_P99_MICROSECONDS)]
