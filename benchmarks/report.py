"""The tables that a run prints, and the goals of each cost: one row is one measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

# Processor time over bare Flask, where no key was sent.
ADDED_MICROSECONDS = 6.0
# Processor time, as a multiple of what the same path takes by hand.
CPU_TO_BY_HAND = {"first": 1.25, "replay": 1.40, "conflict": 1.25, "mismatch": 1.30}
# Requests per second under gunicorn, as a part of those by hand and of the peer's.
RATE_OF_BY_HAND = {"first": 0.85, "replay": 0.85}
RATE_OF_PEER = {"first": 1.0, "replay": 1.4}
# Processor time of the server for one request.
SERVER_MICROSECONDS = {"first": 180.0, "replay": 65.0}
REPLAY_P99_MICROSECONDS = 2_000.0
# Processor time in a new process, beside bare Flask.
IMPORT_MILLISECONDS = 60.0
# Processor time of encryption, for a 2 KB response.
ENCRYPTION_MICROSECONDS = 15.0
OVERHEAD_BYTES = 64
RECORD_BYTES = 1_600.0
FULL_TO_EMPTY = 2.0
LEDGER_BYTES = 4 * 1024
FLOODED_TO_QUIET = 1.10
# The calls of the console's first page, on a store with a million records.
OVERVIEW_MILLISECONDS = 300.0
REMOVING_TO_RESTING = 2.0
# Processor time with transactional effects, as a multiple of what the same path takes by hand on the same database.
SQL_CPU_TO_BY_HAND = {"PostgreSQL": 1.25, "MariaDB": 1.4, "SQLite": 1.4}
# Time of a first request on MariaDB, with records apart from the rows.
MARIADB_FIRST_TO_BY_HAND = 1.3
# The same response from the cache in front of a database. 5 % is what two runs differ by.
TIERED_TO_REDIS = 1.05
# To begin and finish a durable step, as a multiple of two round trips by hand that compare as much.
STEP_TO_BY_HAND = 1.25
# How long a message waits at p99 while other receivers are silent, as a multiple of what it waits on an idle outbox.
SILENT_TO_IDLE = 2.0
PASSED_STEP_MICROSECONDS = 60.0
# A request without steps, where another endpoint has steps. 5 % is what two runs differ by.
WITHOUT_STEPS = 1.05
# Round trips to the store by path (SPEC section 7).
TRIPS = {"first": 2, "replay": 1, "conflict": 1, "mismatch": 1}
# On PostgreSQL with the strategy `insert`, as SPEC promises. The other strategies lock first, and SQLite has one writer.
SQL_STATEMENTS = {"first": 2, "replay": 1, "conflict": 1, "mismatch": 1}
# The claim commits, and so does the end of the request. Transactional effects commit no more often.
SQL_COMMITS = {"first": 2, "replay": 0, "conflict": 0, "mismatch": 0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One budget and what was measured against it."""

    budget: str
    measured: float
    within: bool

    def __str__(self) -> str:
        return f"{self.budget} {'✓' if self.within else '✗ OVER'}"


def at_most(budget: str, measured: float, limit: float) -> Verdict:
    return Verdict(budget, measured, measured <= limit)


def at_least(budget: str, measured: float, limit: float) -> Verdict:
    return Verdict(budget, measured, measured >= limit)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement. `cells` maps column names to values. A column without a value in this row stays empty."""

    case: str
    cells: Mapping[str, float | str]
    verdicts: Sequence[Verdict] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its title and a note that says how to read it."""

    title: str
    note: str
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "rows": [
                {"case": row.case, **row.cells, "verdicts": [asdict(verdict) for verdict in row.verdicts]}
                for row in self.rows
            ],
        }

    def as_text(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name in row.cells))
        lines = [["", *columns, "budget"]]
        for row in self.rows:
            cells = [_shown(row.cells.get(name, "")) for name in columns]
            lines.append([row.case, *cells, "; ".join(map(str, row.verdicts))])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [_aligned(line, widths) for line in lines]
        return "\n".join([self.title, self.note, "", *aligned, ""])


def markdown(section: Section, columns: Sequence[str] = ()) -> str:
    """Return the table as Markdown, with these columns or all."""
    shown = columns or list(dict.fromkeys(name for row in section.rows for name in row.cells))
    goals = any(row.verdicts for row in section.rows)
    lines = [["", *shown, *(["goal"] if goals else [])], ["---"] * (1 + len(shown) + goals)]
    for row in section.rows:
        cells = [_shown(row.cells.get(name, "")) for name in shown]
        lines.append([row.case, *cells, *(["; ".join(map(_marked, row.verdicts))] if goals else [])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _marked(verdict: Verdict) -> str:
    return verdict.budget if verdict.within else f"{verdict.budget}: **missed**"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *cells, last = line
    middle = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
    return "  ".join([first.ljust(widths[0]), *middle, last]).rstrip()


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
