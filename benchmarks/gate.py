"""`bench --gate`: fail if a path costs more against by hand than the committed ratio allows. CI runs it.

Only ratios of processor time within one run, so that the machine hardly matters. Measured at load 4 to 8 on two cores, the
median of 40 rounds of 25 requests had a standard deviation of 1.4 to 2.1 %; the ratio of two medians had up to 7.7 %, that of
two minima up to 6.3 %. A busy machine makes a ratio smaller: more of each request is then waiting for caches, on both sides.
So `--commit` needs an idle machine, and `--gate` does not.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis

from benchmarks import sql_apps
from benchmarks.apps import Gate
from benchmarks.harness import BY_HAND, FIRST, OURS, REPLAY, Case, Cores, describe, measure
from benchmarks.paths import keyed_cases, redis_cases
from benchmarks.report import Row, Section, at_most

COMMITTED = Path(__file__).with_name("committed.json")
TOLERANCE: Final = 0.15
ROUNDS, REQUESTS = 20, 25
COMMIT_ROUNDS = 80
ATTEMPTS: Final = 3
"""A ratio fails if it is too high this many times, each time with new applications."""

NOTE = f"Processor time as a multiple of by hand, the median of those within each round. A ratio may rise by {TOLERANCE:.0%}."
REMEDY = (
    "Make the path as fast as it was: `python3 run.py bench --profile first` shows where its time goes. If the change is worth "
    "its price, commit new ratios from an idle machine, with the reason: `python3 run.py bench --commit`."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A path through this library, and the same path by hand."""

    name: str
    mine: Case
    floor: Case


@contextmanager
def pairs(client: redis.Redis, url: str, cores: Cores) -> Iterator[list[Pair]]:
    """Yield every pair that this machine can measure: without a PostgreSQL there are fewer."""
    with ExitStack() as ends:
        floors = {case.path: case for case in ends.enter_context(redis_cases(client, url, BY_HAND))}
        found = [
            Pair(f"Redis: {case.path}", case, floors[case.path])
            for case in ends.enter_context(redis_cases(client, url, OURS))
        ]
        for database in (ends.enter_context(sql_apps.sqlite()), ends.enter_context(sql_apps.postgresql(None, cores))):
            if database is not None:
                found += _transactional(ends, database)
        yield found


def _transactional(ends: ExitStack, database: sql_apps.Database) -> Iterator[Pair]:
    cases: dict[str, dict[str, Case]] = {}
    for name in (BY_HAND, OURS):
        gate = Gate()
        by_hand = name == BY_HAND
        app = (
            sql_apps.by_hand(database.url, gate, transactional=True)
            if by_hand
            else sql_apps.ours_transactional(database.url, gate)
        )
        ends.callback(app.close)
        cases[name] = {case.path: case for case in ends.enter_context(keyed_cases(name, app.flask, gate))}
    for path in (FIRST, REPLAY):
        yield Pair(f"{database.kind}, transactional: {path}", cases[OURS][path], cases[BY_HAND][path])


def ratios(
    client: redis.Redis, url: str, cores: Cores, *, rounds: int, requests: int, only: Collection[str] | None = None
) -> dict[str, float]:
    """Measure the ratios, or only those with these names, with new applications."""
    with pairs(client, url, cores) as found:
        chosen = [pair for pair in found if only is None or pair.name in only]
        timings = measure(
            [case for pair in chosen for case in (pair.mine, pair.floor)], rounds=rounds, requests=requests
        )
        return {
            pair.name: mine.processor_ratio_to(floor)
            for pair, mine, floor in zip(chosen, timings[::2], timings[1::2], strict=True)
        }


def committed() -> dict[str, float]:
    """Return the committed ratios."""
    found: dict[str, float] = json.loads(COMMITTED.read_text(encoding="utf-8"))["ratios"]
    return found


def commit(
    client: redis.Redis, url: str, cores: Cores, *, rounds: int = COMMIT_ROUNDS, requests: int = REQUESTS
) -> Section:
    """Measure every ratio and write it to the file that `check` compares with."""
    measured = ratios(client, url, cores, rounds=rounds, requests=requests)
    before = committed() if COMMITTED.exists() else {}
    document = {
        "machine": describe(client, cores),
        "ratios": {name: round(ratio, 3) for name, ratio in measured.items()},
    }
    COMMITTED.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rows = [Row(name, {"before": before.get(name, ""), "committed": ratio}) for name, ratio in measured.items()]
    return Section(f"Committed ratios, in {COMMITTED.name}", NOTE, rows)


def check(
    client: redis.Redis, url: str, cores: Cores, *, rounds: int = ROUNDS, requests: int = REQUESTS
) -> tuple[Section, list[str]]:
    """Compare every ratio with the committed one. Return a table, and a sentence for each one that fails."""
    allowed = committed()
    tries = {name: [ratio] for name, ratio in ratios(client, url, cores, rounds=rounds, requests=requests).items()}
    for _ in range(ATTEMPTS - 1):
        again = [name for name, found in tries.items() if _too_high(name, min(found), allowed)]
        if not again:
            break
        # Twice the rounds: a chance that repeats is one that more rounds end.
        for name, ratio in ratios(client, url, cores, rounds=2 * rounds, requests=requests, only=again).items():
            tries[name].append(ratio)
    return _table(tries, allowed), list(_failures(tries, allowed))


def _too_high(name: str, ratio: float, allowed: Mapping[str, float]) -> bool:
    return name in allowed and ratio > allowed[name] * (1 + TOLERANCE)


def _table(tries: Mapping[str, list[float]], allowed: Mapping[str, float]) -> Section:
    shown = Section("Ratios against the committed ones", NOTE)
    for name, found in tries.items():
        if name in allowed:
            most = allowed[name] * (1 + TOLERANCE)
            cells: dict[str, float | str] = {
                "committed": allowed[name],
                "measured": min(found),
                "change": f"{min(found) / allowed[name] - 1:+.0%}",
            }
            shown.rows.append(Row(name, cells, [at_most(f"≤ {most:.2f}", min(found), most)]))
    return shown


def _failures(tries: Mapping[str, list[float]], allowed: Mapping[str, float]) -> Iterator[str]:
    for name, found in tries.items():
        if name not in allowed:
            yield f"{name} has no committed ratio. Write it on an idle machine: `python3 run.py bench --commit`."
        elif _too_high(name, min(found), allowed):
            measured = ", ".join(f"{ratio:.2f}" for ratio in found)
            yield (
                f"{name} takes {min(found):.2f} × the processor time of by hand. {allowed[name]:.2f} is committed, and "
                f"{allowed[name] * (1 + TOLERANCE):.2f} is the most. Measured {len(found)} times: {measured}."
            )


def report(shown: Section, failures: Collection[str]) -> int:
    """Print the comparison. Return the exit code."""
    print(shown.as_text())
    if missing := committed().keys() - {row.case for row in shown.rows}:
        print(f"Not measured on this machine: {', '.join(sorted(missing))}.", file=sys.stderr)
    python = json.loads(COMMITTED.read_text(encoding="utf-8"))["machine"]["python"]
    if failures and python.split(".")[:2] != platform.python_version().split(".")[:2]:
        print(
            f"The ratios were committed on Python {python}, and this is {platform.python_version()}.", file=sys.stderr
        )
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures:
        print(REMEDY, file=sys.stderr)
    return 1 if failures else 0
