"""The tables that a run prints, and the budgets that SPEC section 14 allows: one row is one measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

# What SPEC section 14 allows.
ADDED_MICROSECONDS = 10.0
FIRST_TO_FLOOR = 1.25
REPLAY_TO_FLOOR = 1.25
REPLAY_P99_MICROSECONDS = 2_000.0
REFUSAL_P99_MICROSECONDS = 5_000.0
FIRST_OF_BARE_RATE = 0.55
REPLAY_OF_BARE_RATE = 0.80
OVERHEAD_BYTES = 64
RECORD_BYTES = 1.1 * 1024
FULL_TO_EMPTY = 2.0
LEDGER_BYTES = 4 * 1024
FLOODED_TO_QUIET = 1.10
REMOVING_TO_RESTING = 2.0
# Processor time of our process over bare Flask, or with transactional effects over the business alone. These are targets:
# other machines and other versions of SQLAlchemy take other times.
SQL_FIRST_ADDED_CPU = 350.0
SQL_REPLAY_ADDED_CPU = 140.0
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


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *cells, last = line
    middle = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
    return "  ".join([first.ljust(widths[0]), *middle, last]).rstrip()


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
