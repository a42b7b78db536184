"""Rows for people and for machines. One row is one measurement, with the budgets it is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.budgets import Verdict


@dataclass(frozen=True, slots=True)
class Row:
    """`cells` are what this section shows, by column name; a column that a row has no value for stays empty."""

    case: str
    cells: Mapping[str, float | str]
    verdicts: Sequence[Verdict] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its title and one line that says how to read it."""

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
