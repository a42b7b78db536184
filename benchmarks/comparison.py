"""The table that counts: the same service by hand, with this library and with its peer, in one run.

In one process and under gunicorn. Each row has the goals that it must reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import redis

from benchmarks import report
from benchmarks.harness import (
    BARE,
    BY_HAND,
    EMPTY_HOOKS,
    FIRST,
    GET,
    NO_KEY,
    OURS,
    OUTCOMES,
    PATHS,
    PEER,
    REPLAY,
    UNCOMPRESSED,
    Case,
    Cores,
    Timing,
    measure,
)
from benchmarks.paths import redis_cases
from benchmarks.report import Row, Section, Verdict, at_least, at_most
from benchmarks.server_cost import ServerTime, counting_proxy, kept_bytes, round_trips, server_times
from benchmarks.serving import Served, serve

NOTE = (
    "`CPU`, `p50` and `p99` in µs. In one process: through the WSGI callable, one thread. `Redis` is the time of commands in "
    "the server, `its CPU` the\nprocessor time of the server, `bytes` the memory that a 2 KB response takes. Under gunicorn:"
    " gthread, 1 worker, 8 threads, 8 connections.\nMedians of interleaved rounds; a ratio or a difference is the median of "
    "those within each round. Compare within one run only."
)
COMMANDS_NOTE = "µs of one request in the commands and scripts of the server, by the server's own count."

AppPath: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one path through one application."""

    timing: Timing
    served: Served
    server: ServerTime | None = None
    trips: float | None = None
    size: float | None = None


Measured: TypeAlias = dict[AppPath, Figures]


def compare(
    client: redis.Redis,
    url: str,
    cores: Cores,
    *,
    rounds: int,
    requests: int,
    serving_rounds: int,
    seconds: float,
    applications: Sequence[str] = (BARE, EMPTY_HOOKS, BY_HAND, OURS, UNCOMPRESSED, PEER),
) -> Measured:
    """Measure every path of these applications, by application and path."""
    with ExitStack() as held:
        cases = held.enter_context(redis_cases(client, url, *applications))
        timings = measure(cases, rounds=rounds, requests=requests)
        keyed = [case for case in cases if case.path in OUTCOMES]
        times = dict(zip(_names(keyed), server_times(client, keyed, rounds=rounds), strict=True))
        sizes = {case.app: kept_bytes(client, case.flask) for case in keyed if case.path == FIRST}
        served = serve(cases, url, cores, rounds=serving_rounds, seconds=seconds)
        trips = _trips(url, applications)
    return {
        name: Figures(timing, under, times.get(name), trips.get(name), sizes.get(name[0]) if name[1] == FIRST else None)
        for name, timing, under in zip(_names(cases), timings, served, strict=True)
    }


def _names(cases: Sequence[Case]) -> list[AppPath]:
    return [(case.app, case.path) for case in cases]


def _trips(url: str, applications: Sequence[str]) -> dict[AppPath, float]:
    with (
        counting_proxy(url) as (proxy, through),
        redis.Redis.from_url(through) as client,
        redis_cases(client, through, *applications) as cases,
    ):
        return {
            (case.app, case.path): round_trips(proxy, case) for case in cases if case.app not in (BARE, EMPTY_HOOKS)
        }


def sections(measured: Measured) -> list[Section]:
    """Return the table, and a table of the server's time by command."""
    shown = Section("By hand, ours and the peer", NOTE)
    commands = Section("Time in the Redis server, by command", COMMANDS_NOTE)
    for path in PATHS:
        for (app, its_path), figures in measured.items():
            if its_path == path:
                shown.rows.append(Row(f"{path}: {app}", _cells(app, path, measured), _verdicts(app, path, measured)))
                if figures.server is not None:
                    commands.rows.append(
                        Row(f"{path}: {app}", {**figures.server.commands, "all": figures.server.total})
                    )
    return [shown, commands]


def _cells(app: str, path: str, measured: Measured) -> dict[str, float | str]:
    """Return the cells of one row. All rows have the same columns, and some stay empty."""
    mine = measured[app, path]
    floor = measured.get((BY_HAND, path)) if app in (OURS, UNCOMPRESSED, PEER) else None
    return {
        "requests/s": mine.timing.rate,
        "p50": mine.timing.typical,
        "p99": mine.timing.quantile(0.99),
        "CPU": median(mine.timing.processor),
        "× by hand": mine.timing.processor_ratio_to(floor.timing) if floor is not None else "",
        "trips": int(mine.trips) if mine.trips is not None and mine.trips == int(mine.trips) else mine.trips or "",
        "Redis": mine.server.total if mine.server is not None else "",
        "its CPU": mine.server.processor if mine.server is not None else "",
        "bytes": mine.size if mine.size is not None else "",
        "gunicorn/s": mine.served.rate,
        "of by hand": mine.served.rate_of(floor.served) if floor is not None else "",
        "its p50": median(mine.served.p50),
        "its p99": median(mine.served.p99),
        "worker CPU": median(mine.served.processor),
    }


def _verdicts(app: str, path: str, measured: Measured) -> list[Verdict]:
    if app != OURS:
        return []
    mine, floor, bare, peer = (measured.get((name, path)) for name in (OURS, BY_HAND, BARE, PEER))
    verdicts: list[Verdict] = []
    assert mine is not None
    if path in (GET, NO_KEY) and bare is not None:
        added = mine.timing.processor_added_to(bare.timing)
        verdicts.append(at_most(f"≤ +{report.ADDED_MICROSECONDS:.0f} µs CPU", added, report.ADDED_MICROSECONDS))
    if path in report.CPU_TO_BY_HAND and floor is not None:
        most = report.CPU_TO_BY_HAND[path]
        verdicts.append(at_most(f"≤ {most} × by hand", mine.timing.processor_ratio_to(floor.timing), most))
    if path in report.RATE_OF_BY_HAND and floor is not None:
        least = report.RATE_OF_BY_HAND[path]
        verdicts.append(at_least(f"gunicorn ≥ {least} of by hand", mine.served.rate_of(floor.served), least))
    if path in report.RATE_OF_PEER and peer is not None:
        least = report.RATE_OF_PEER[path]
        verdicts.append(at_least(f"gunicorn ≥ {least} of {PEER}", mine.served.rate_of(peer.served), least))
    if path in report.SERVER_MICROSECONDS and mine.server is not None:
        most = report.SERVER_MICROSECONDS[path]
        verdicts.append(at_most(f"server CPU ≤ {most:.0f} µs", mine.server.processor, most))
    if mine.trips is not None:
        allowed = report.TRIPS.get(path, 0)
        verdicts.append(Verdict(f"{allowed} trips", mine.trips, mine.trips == allowed))
    if mine.size is not None:
        verdicts.append(at_most(f"≤ {report.RECORD_BYTES:,.0f} B", mine.size, report.RECORD_BYTES))
    if path == REPLAY:
        p99 = mine.timing.quantile(0.99)
        verdicts.append(at_most("p99 < 2 ms", p99, report.REPLAY_P99_MICROSECONDS))
    return verdicts
