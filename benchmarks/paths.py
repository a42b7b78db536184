"""The paths of a request, in memory and on Redis: how long each takes, how often it reaches Redis, where its time goes."""

from __future__ import annotations

import cProfile
import pstats
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias
from uuid import uuid4

import redis
from flask import Flask

from benchmarks import apps, report
from benchmarks.apps import OTHER_PAYMENT, PAYMENT
from benchmarks.harness import (
    BARE,
    BY_HAND,
    CONFLICT,
    FIRST,
    GET,
    MISMATCH,
    NO_KEY,
    OURS,
    OURS_MEMORY,
    REPLAY,
    Case,
    Environ,
    Timing,
    call,
    environ,
    in_flight,
    measure,
)
from benchmarks.report import Row, Section, Verdict, at_most
from flask_idempotency.stores.memory import MemoryStore


@contextmanager
def all_cases(client: redis.Redis, url: str) -> Iterator[list[Case]]:
    """Yield every case. Requests that hold a key stay in flight until the end of the block."""
    with ExitStack() as until_the_end:
        yield [
            *_without_key(BARE, apps.bare()),
            *_by_hand(client),
            *until_the_end.enter_context(our_cases(OURS, url)),
            *until_the_end.enter_context(our_cases(OURS_MEMORY, MemoryStore())),
        ]


@contextmanager
def our_cases(name: str, store: object) -> Iterator[list[Case]]:
    """Yield every path through this library on one store."""
    gate = apps.Gate()
    app = apps.ours(store, gate=gate)
    with keyed_cases(name, app, gate) as keyed:
        yield [*_without_key(name, app), *keyed]


@contextmanager
def keyed_cases(name: str, app: Flask, gate: apps.Gate) -> Iterator[list[Case]]:
    """Yield the paths of requests with a key. `POST /held` of this application must wait at this gate."""
    replay = replay_case(name, app)
    known = str(replay.make()["HTTP_IDEMPOTENCY_KEY"])
    with in_flight(app, gate, PAYMENT) as held:
        yield [
            first_case(name, app),
            replay,
            Case(name, CONFLICT, app, partial(_post, "/held", PAYMENT, held)),
            Case(name, MISMATCH, app, partial(_post, "/payments", OTHER_PAYMENT, known)),
        ]


def first_case(name: str, app: Flask) -> Case:
    return Case(name, FIRST, app, _new_key)


def replay_case(name: str, app: Flask) -> Case:
    return Case(name, REPLAY, app, partial(_post, "/payments", PAYMENT, _known_key(app)))


def conflict_case(name: str, app: Flask) -> Case:
    """Return the conflict of an application that cannot tell a key in flight from a known one."""
    return Case(name, CONFLICT, app, partial(_post, "/payments", PAYMENT, _known_key(app)))


def no_key_case(name: str, app: Flask) -> Case:
    return Case(name, NO_KEY, app, partial(environ, "POST", "/payments", body=PAYMENT))


def _without_key(name: str, app: Flask) -> list[Case]:
    return [
        Case(name, GET, app, partial(environ, "GET", "/payments/ch_3MmlLrLkdIwHu7ix0snN0B15")),
        no_key_case(name, app),
    ]


def _by_hand(client: redis.Redis) -> list[Case]:
    writing, reading = apps.by_hand_writing(client), apps.by_hand_reading(client)
    return [
        *_without_key(BY_HAND, writing),
        first_case(BY_HAND, writing),
        replay_case(BY_HAND, reading),
        conflict_case(BY_HAND, writing),
    ]


def _known_key(app: Flask) -> str:
    key = str(uuid4())
    for _ in repeat(None, 2):
        call(app, _post("/payments", PAYMENT, key))
    return key


def _new_key() -> Environ:
    return _post("/payments", PAYMENT, str(uuid4()))


def _post(path: str, body: bytes, key: str) -> Environ:
    return environ("POST", path, body=body, key=key)


REQUESTS_NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds. `cpu` is the processor time of this process, which other "
    "processes hardly change.\nA ratio or a difference is the median of those within each round."
)

Timings: TypeAlias = dict[tuple[str, str], Timing]


def requests_section(client: redis.Redis, url: str, *, rounds: int, requests: int) -> Section:
    with all_cases(client, url) as cases:
        measured = measure(cases, rounds=rounds, requests=requests)
    timings = {(timing.case.app, timing.case.path): timing for timing in measured}
    return Section("Requests in one process", REQUESTS_NOTE, [_timed_row(timing, timings) for timing in measured])


def _timed_row(timing: Timing, timings: Timings) -> Row:
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
    return Row(f"{timing.case.app}: {timing.case.path}", cells, _timed_verdicts(timing, bare, floor))


def _bare(timing: Timing, timings: Timings) -> Timing:
    return timings[BARE, GET if timing.case.path == GET else NO_KEY]


def _floor(timing: Timing, timings: Timings) -> Timing | None:
    """Return the hand-written case with the same round trips. A mismatch reads what a replay reads."""
    if timing.case.app in (BARE, BY_HAND):
        return None
    return timings[BY_HAND, REPLAY if timing.case.path == MISMATCH else timing.case.path]


def _timed_verdicts(timing: Timing, bare: Timing, floor: Timing | None) -> list[Verdict]:
    if floor is None:
        return []
    path, p99 = timing.case.path, timing.quantile(0.99)
    if path in (GET, NO_KEY):
        return [at_most("< 10 µs added", timing.added_to(bare), report.ADDED_MICROSECONDS)]
    if timing.case.app == OURS_MEMORY:
        return []  # it shows the library's share, which no round trip hides
    if path == FIRST:
        return [at_most("≤ 1.25 × by hand", timing.ratio_to(floor), report.FIRST_TO_FLOOR)]
    if path == REPLAY:
        return [
            at_most("≤ 1.25 × by hand", timing.ratio_to(floor), report.REPLAY_TO_FLOOR),
            at_most("p99 < 2 ms", p99, report.REPLAY_P99_MICROSECONDS),
        ]
    return [at_most("p99 < 5 ms", p99, report.REFUSAL_P99_MICROSECONDS)]


TRIPS_NOTE = "Writes to the connection per request. A pipeline is one."
COUNTED_REQUESTS = 20


class CountedConnection(redis.Connection):
    """Count every send, by any way of redis-py."""

    sent = 0

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        CountedConnection.sent += 1
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]


def trips_section(url: str) -> Section:
    """Count the round trips of each path to Redis. The numbers are exact on any machine."""
    pool = redis.ConnectionPool.from_url(url, connection_class=CountedConnection)
    client = redis.Redis(connection_pool=pool)
    shown = Section("Round trips to Redis", TRIPS_NOTE)
    with client, our_cases(OURS, client) as cases:
        for case in cases:
            case.check(call(case.flask, case.make()))
            before = CountedConnection.sent
            for _ in range(COUNTED_REQUESTS):
                case.check(call(case.flask, case.make()))
            trips = (CountedConnection.sent - before) / COUNTED_REQUESTS
            allowed = report.TRIPS.get(case.path, 0)
            verdict = Verdict(f"{allowed}", trips, trips == allowed)
            shown.rows.append(Row(f"{case.app}: {case.path}", {"trips": trips}, [verdict]))
    return shown


LIBRARY = Path(__file__).resolve().parents[1]
PROFILE_WARM_UP_REQUESTS = 200
SHOWN = 45

PROFILE_NOTE = "Time per request without callees, and `with callees`. The profiler inflates both."


def profile_sections(case: Case, *, requests: int) -> list[Section]:
    """Profile one path. Return a table by module and package, and one by function.

    A profiler makes every call dearer, small Python functions most of all. Read shares and numbers of calls here, and take
    microseconds from `requests_section`.
    """
    for _ in range(PROFILE_WARM_UP_REQUESTS):
        call(case.flask, case.make())
    made = [case.make() for _ in range(requests)]
    profile = cProfile.Profile()
    profile.enable()
    for each in made:
        call(case.flask, each)
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # typeshed has only what is printed
    by_function, by_place = (
        Section(f"{case.app}, {case.path}: functions", PROFILE_NOTE),
        Section(f"{case.app}, {case.path}: places", PROFILE_NOTE),
    )
    places: dict[str, list[float]] = {}
    found = []
    for (file, line, name), (_, calls, own, whole, _) in stats.items():
        per_request = [calls / requests, own / requests * 1e6, whole / requests * 1e6]
        found.append((per_request, f"{_place(file)}:{line} {name}" if line else name))
        share = places.setdefault(_place(file), [0.0, 0.0])
        share[0] += per_request[0]
        share[1] += per_request[1]
    for (calls, own, whole), name in sorted(found, key=lambda each: -each[0][1])[:SHOWN]:
        by_function.rows.append(Row(name, {"calls": calls, "own µs": own, "with callees": whole}))
    for place, (calls, own) in sorted(places.items(), key=lambda each: -each[1][1])[:SHOWN]:
        by_place.rows.append(Row(place, {"calls": calls, "own µs": own}))
    return [by_place, by_function]


def _place(file: str) -> str:
    if file == "~":
        return "built-in"
    path = Path(file)
    roots = (LIBRARY, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib")))
    # .venv is in the checkout, so try the longest root first.
    for root in sorted(roots, key=lambda root: -len(root.parts)):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name
