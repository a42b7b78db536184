"""Where the microseconds of one path go, function by function: for whoever wants to make it faster.

A profiler makes every call dearer, small Python functions most of all: read shares and numbers of calls, and take
microseconds from `in_process`.
"""

from __future__ import annotations

import cProfile
import pstats
import sysconfig
from pathlib import Path

from benchmarks.calls import call
from benchmarks.cases import Case
from benchmarks.table import Row, Section

LIBRARY = Path(__file__).resolve().parents[1]
WARM_UP_REQUESTS = 200
SHOWN = 45

NOTE = "Own time per request under the profiler, which inflates it; `with callees` counts what it calls as well."


def sections(case: Case, *, requests: int) -> list[Section]:
    """One table by room of the house and by package, one by function."""
    for _ in range(WARM_UP_REQUESTS):
        call(case.flask, case.make())
    environs = [case.make() for _ in range(requests)]
    profile = cProfile.Profile()
    profile.enable()
    for environ in environs:
        call(case.flask, environ)
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # typeshed has only what is printed
    by_function, by_place = (
        Section(f"{case.app}, {case.path}: functions", NOTE),
        Section(f"{case.app}, {case.path}: places", NOTE),
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
    # .venv is in the checkout, so the more specific root has to win.
    for root in sorted(roots, key=lambda root: -len(root.parts)):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name
