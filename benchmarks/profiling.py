"""Where the time of one path goes: by part of a request, by module, and by function."""

from __future__ import annotations

import cProfile
import pstats
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import FrameType

from benchmarks.harness import Case, call, measure
from benchmarks.report import Row, Section

LIBRARY = Path(__file__).resolve().parents[1]
PROFILE_WARM_UP_REQUESTS = 200
SHOWN = 45
SAMPLE_SECONDS = 0.001
AT_ONCE = 100

# The first that is in the path of a file names its part.
PARTS = (
    ("Flask and Werkzeug", ("/flask/", "/werkzeug/", "/blinker/")),
    ("redis-py", ("/redis/", "/hiredis/")),
    ("SQLAlchemy and its driver", ("/sqlalchemy/", "/flask_sqlalchemy/", "/psycopg/")),
    ("store", ("flask_idempotency/stores/",)),
    ("identity", ("flask_idempotency/engine/keys.py", "flask_idempotency/web/principals.py")),
    ("fingerprint", ("flask_idempotency/engine/fingerprint.py", "flask_idempotency/web/request_body.py")),
    ("codec", ("flask_idempotency/codec/",)),
    ("lease", ("flask_idempotency/engine/lease.py",)),
    ("events", ("flask_idempotency/engine/events.py", "flask_idempotency/signals.py", "flask_idempotency/logs.py")),
    ("engine", ("flask_idempotency/engine/",)),
    ("our hooks", ("flask_idempotency/",)),
    ("hooks by hand", ("benchmarks/by_hand.py", "benchmarks/sql_apps.py")),
    ("view and server", ("benchmarks/",)),
)
OTHER = "other"

PARTS_NOTE = (
    "µs of processor time of one request, by samples of the call stack: the innermost function of a part names it, so that a "
    "part has the\ntime of the standard library that it calls. Samples slow nothing down, and differ by some percent from run "
    "to run."
)
PROFILE_NOTE = "Time per request without callees, and `with callees`. The profiler inflates both."


def parts_section(cases: Sequence[Case], *, seconds: float) -> Section:
    """Sample where each case spends its processor time, for so many seconds each."""
    columns = {f"{case.app}: {case.path}": _shares(case, seconds) for case in cases}
    processor = [median(timing.processor) for timing in measure(cases, rounds=5, requests=AT_ONCE)]
    shown = Section("Where the time of a request goes", PARTS_NOTE)
    for part in (*(name for name, _ in PARTS), OTHER):
        cells: dict[str, float | str] = {
            column: round(shares[part] * whole) if part in shares else ""
            for (column, shares), whole in zip(columns.items(), processor, strict=True)
        }
        if any(cells.values()):
            shown.rows.append(Row(part, cells))
    shown.rows.append(Row("whole", {column: round(whole) for column, whole in zip(columns, processor, strict=True)}))
    return shown


def _shares(case: Case, seconds: float) -> dict[str, float]:
    """Return the share of each part of the processor time of this thread."""
    for _ in range(PROFILE_WARM_UP_REQUESTS):
        call(case.flask, case.make())
    sampled: Counter[str] = Counter()
    known: dict[str, str | None] = {}

    def sample(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in known:
                known[file] = part_of(file)
            part = known[file]
            if part is not None:
                sampled[part] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, sample)
    try:
        spent = 0.0
        while spent < seconds:
            made = [case.make() for _ in range(AT_ONCE)]
            signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
            began = time.thread_time()
            for each in made:
                call(case.flask, each)
            spent += time.thread_time() - began
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return {part: number / max(1, sampled.total()) for part, number in sampled.items()}


def part_of(file: str) -> str | None:
    """Return the part that this source file belongs to. The standard library works for its callers, so it has none."""
    path = Path(file)
    if path.is_relative_to(LIBRARY) and not path.is_relative_to(Path(sys.prefix)):
        shown = path.relative_to(LIBRARY).as_posix()
    elif path.is_relative_to(sysconfig.get_path("purelib")) or path.is_relative_to(sysconfig.get_path("platlib")):
        shown = f"/{path.relative_to(sysconfig.get_path('purelib')).as_posix()}"
    else:
        return None
    return next((name for name, places in PARTS if any(shown.startswith(place) for place in places)), OTHER)


def profile_sections(case: Case, *, requests: int) -> list[Section]:
    """Profile one path. Return a table by module and package, and one by function.

    A profiler makes every call dearer, small Python functions most of all. Read shares and numbers of calls here, and take
    microseconds from `comparison`.
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
