"""Print the output of a command: sentences, facts and tables, at the width of the terminal and in colour.

Every text is escaped, because stores hold names that clients choose. A pipe or a file gets whole lines without colour. A
terminal gets colour, and lines that fit its width. A colour only repeats what a word says. `NO_COLOR` and `TERM=dumb` turn
it off; `FORCE_COLOR` turns it on for a pipe too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from textwrap import wrap
from typing import Final, TextIO
from unicodedata import combining, east_asian_width

import click

from flask_idempotency.engine.escape import printable, printable_lines
from flask_idempotency.operations.records import ChangeView, Condition, RecordView, StepView
from flask_idempotency.operations.times import format_duration

# What a part of the output is.


class Style(Enum):
    """What a colour means. The value is its code for a terminal (ECMA-48, SGR)."""

    HEAD = "1"
    BAD = "1;31"
    WARNING = "33"
    GOOD = "32"


@dataclass(frozen=True, slots=True)
class Styled:
    """A text whose colour repeats its meaning."""

    text: str
    style: Style | None


Cell = str | Styled


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    least: int | None = 12
    """A terminal that is too narrow shortens the cells to no less than this. None: it never shortens them."""
    rare: bool = False
    """Left out, unless the table is wide or the terminal has room for it."""
    wraps: bool = False
    """A terminal gets long cells in several lines. Else they are shortened."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that a terminal gets at its width. `wide`: with every column, and nothing shortened."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Lines of a name and a value. A terminal gets long values in several lines."""

    rows: tuple[tuple[str, Cell], ...]
    width: int = 13
    """Characters of the longest name and its colon."""


@dataclass(frozen=True, slots=True)
class Item:
    """A word in colour, and paragraphs beside it. A terminal gets long paragraphs in several lines."""

    word: Styled
    paragraphs: tuple[str, ...]
    width: int = 8
    """Characters of the longest word, and a space."""


Part = str | Styled | Table | Facts | Item


def say(*parts: Part, err: bool = False, newline: bool = True) -> None:
    """Print these parts, each on lines of its own. Escape every control sequence in them."""
    screen = screen_of(err=err)
    lines = [line for part in parts or ("",) for line in _lines(part, screen)]
    text = "\n".join("".join(_painted(piece) if screen.colour else piece.text for piece in line) for line in lines)
    text = _writable(text, screen.encoding)
    click.echo(text, err=err, nl=newline, color=screen.colour or None)


# Where the output goes.


@dataclass(frozen=True, slots=True)
class Screen:
    """What the reader of a stream sees."""

    width: int | None
    """Columns of the terminal. None: there is no terminal, so no line is shortened or wrapped."""
    colour: bool
    encoding: str = "utf-8"

    @property
    def ellipsis(self) -> str:
        return _writable("…", self.encoding)


def screen_of(*, err: bool = False) -> Screen:
    """Return what the reader of the standard output sees, or of the standard error."""
    stream = sys.stderr if err else sys.stdout
    terminal = stream.isatty()
    wanted = (terminal or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    colour = wanted and os.environ.get("TERM") != "dumb"
    return Screen(_columns(stream) if terminal else None, colour, stream.encoding or "utf-8")


def _columns(stream: TextIO) -> int:
    """Return the width of this terminal. `shutil.get_terminal_size` knows only that of the standard output."""
    typed = os.environ.get("COLUMNS", "")
    if typed.isdecimal() and int(typed) > 0:
        return int(typed)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, ValueError, OSError):
        return 80


_ASCII: Final = str.maketrans({"…": "...", "→": ">"})


def _writable(text: str, encoding: str) -> str:
    """Return this text with characters replaced or escaped that the stream cannot encode: a pipe of Windows has few."""
    try:
        text.encode(encoding)
    except UnicodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


# From parts to lines. A line is a list of texts with their styles, and both ways to print it have the same text.

_Line = list[Styled]


def _painted(piece: Styled) -> str:
    return piece.text if piece.style is None or not piece.text else f"\x1b[{piece.style.value}m{piece.text}\x1b[0m"


def _lines(part: Part, screen: Screen) -> Iterator[_Line]:
    match part:
        case Table():
            yield from _table(part, screen)
        case Facts():
            for name, value in part.rows:
                yield from _fact(printable(name), _styled(value), part.width, screen)
        case Item():
            yield from _item(part, screen)
        case Styled():
            for line in printable_lines(part.text).split("\n"):
                yield from ([Styled(text, part.style)] for text in _wrapped(line, screen.width))
        case str():
            for line in printable_lines(part).split("\n"):
                yield from ([Styled(text, None)] for text in _wrapped(line, screen.width))


def _styled(cell: Cell) -> Styled:
    """Return the cell as one line of printable text."""
    styled = Styled(cell, None) if isinstance(cell, str) else cell
    return Styled(printable(styled.text), styled.style)


def _fact(name: str, value: Styled, width: int, screen: Screen) -> Iterator[_Line]:
    label, room = f"{name + ':':<{width}} ", None if screen.width is None else screen.width - width - 1
    longest = max(map(_width, value.text.split(" ")))
    if room is None or longest <= room:
        first, *rest = _wrapped(value.text, room)
        yield [Styled(label, None), Styled(first, value.style)]
        yield from ([Styled(" " * (width + 1) + text, value.style)] for text in rest)
        return
    # A long word, such as an id, gets the whole line, so that a reader can copy it.
    yield [Styled(label.rstrip(), None)]
    yield from ([Styled("  " + text, value.style)] for text in _wrapped(value.text, (screen.width or 0) - 2))


def _item(item: Item, screen: Screen) -> Iterator[_Line]:
    begin = _styled(item.word)
    for paragraph in map(printable, item.paragraphs):
        mark = "→ " if paragraph.startswith("→ ") else ""
        room = None if screen.width is None else screen.width - item.width - 1 - len(mark)
        for number, text in enumerate(_wrapped(paragraph.removeprefix(mark), room)):
            gap = " " * (item.width + 1 - _width(begin.text))
            yield [begin, Styled(gap + (" " * len(mark) if number else mark) + text, None)]
            begin = Styled("", None)


def _table(table: Table, screen: Screen) -> Iterator[_Line]:
    rows = [[_styled(Styled(column.name, Style.HEAD)) for column in table.columns]]
    rows += [list(map(_styled, row)) for row in table.rows]
    natural = [max(_width(row[number].text) for row in rows) for number in range(len(table.columns))]
    shown = _chosen(table, natural, screen.width)
    widths = [natural[number] for number in shown]
    if screen.width is not None and not table.wide:
        widths = _fitted(widths, [table.columns[number] for number in shown], screen.width)
    for row in rows:
        cells = []
        for number, width in zip(shown, widths, strict=True):
            text = row[number].text
            wraps = table.columns[number].wraps
            cells.append(list(_wrapped(text, width)) if wraps else [_shortened(text, width, screen.ellipsis)])
        for level in range(max(map(len, cells))):
            line: _Line = []
            for number, width, texts in zip(shown, widths, cells, strict=True):
                text = texts[level].rstrip() if level < len(texts) else ""
                line += [Styled(text, row[number].style), Styled(" " * (width - _width(text) + 2), None)]
            while line and not line[-1].text.strip():
                line.pop()
            yield line


def _chosen(table: Table, natural: Sequence[int], room: int | None) -> list[int]:
    """Return the columns to show: also rare ones, from the left, as long as the terminal has room for whole cells."""
    chosen = [number for number, column in enumerate(table.columns) if table.wide or not column.rare]
    for number, column in enumerate(table.columns):
        more = sorted([*chosen, number])
        if column.rare and not table.wide and room is not None and _total([natural[each] for each in more]) <= room:
            chosen = more
    return chosen


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fitted(widths: list[int], columns: Sequence[Column], room: int) -> list[int]:
    """Return widths that fit the terminal, if the columns allow it. The widest column gives first."""
    widths = list(widths)
    while _total(widths) > room:
        longer = [
            number
            for number, column in enumerate(columns)
            if column.least is not None and widths[number] > column.least
        ]
        if not longer:
            break
        widths[max(longer, key=lambda number: widths[number])] -= 1
    return widths


def _shortened(text: str, width: int, ellipsis: str) -> str:
    if _width(text) <= width:
        return text
    while text and _width(text) + len(ellipsis) > width:
        text = text[:-1]
    return text + ellipsis


def _wrapped(line: str, width: int | None) -> Iterator[str]:
    """Yield this line, at most `width` characters at a time, and broken at spaces where that can be.

    A terminal itself breaks a line of Chinese characters, which take two columns each.
    """
    # JSON stays one line.
    if width is None or _width(line) <= width or line.startswith("{"):
        yield line
        return
    width = max(width, 4)
    indent = line[: len(line) - len(line.lstrip(" "))][: width // 2]
    yield from wrap(indent + line.lstrip(" "), width, subsequent_indent=indent, break_on_hyphens=False) or ("",)


def _width(text: str) -> int:
    """Return the columns of a terminal that this text takes: Chinese characters take two."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


# Names, times and records.


def clean(text: str | None) -> str:
    """Return this text with control characters escaped: names come from clients."""
    return "-" if text is None else printable(text) or "-"


def ago(seconds: float | None, *, units: int = 2) -> str:
    """Return `3 min 12 s ago`, or in one unit `3 min ago`."""
    return "-" if seconds is None else f"{format_duration(seconds, units=units)} ago"


def state_of(view: RecordView) -> Styled:
    """Return the state of a record as an operator sees it, and its colour."""
    return Styled(view.condition.value, _COLOURS[view.condition])


_COLOURS: Final = {
    Condition.QUARANTINED: Style.BAD,
    Condition.LEASE_EXPIRED: Style.WARNING,
    Condition.PAUSED: Style.WARNING,
    Condition.IN_FLIGHT: None,
    Condition.COMPLETED: Style.GOOD,
}


def facts_of(view: RecordView, changes: Sequence[ChangeView] = ()) -> Facts:
    """Return a record as an operator reads it, one fact a line. `changes` are those of its audit trail."""
    state, reason = state_of(view), f" ({view.reason})" if view.reason else ""
    rows: list[tuple[str, Cell]] = [
        ("id", view.handle),
        ("in logs", view.record),
        ("state", Styled(state.text + reason, state.style)),
        ("request", f"{clean(view.method)} {clean(view.endpoint)}"),
        ("tenant", clean(view.tenant)),
        ("principal", clean(view.principal)),
        ("attempt", f"{view.attempt} (fence {view.fence})"),
        ("first used", f"{view.requested_at}, {ago(view.first_used_ago)}"),
    ]
    if view.owner is not None:
        lease = "not expired" if view.lease_ended_ago is None else f"expired {ago(view.lease_ended_ago)}"
        if view.paused:
            lease += "; the next retry goes on after the finished steps"
        elif view.condition is not Condition.QUARANTINED:
            lease += "; then a retry takes over" if view.on_expiry == "takeover" else "; then quarantined"
        living = view.owner.may_live_for
        runs = f"may run for another {format_duration(living)}" if living else "not running"
        rows += [("lease", lease), ("owner", f"last seen {ago(view.owner.last_seen_ago)}, {runs}")]
    if view.completed_at is not None:
        rows.append(("completed", f"{view.completed_at}, after {view.duration or 0.0:.3f} s"))
    if view.expires_at is not None:
        rows.append(("kept until", view.expires_at))
    if (answer := view.answer) is not None:
        sealed = f"encrypted under {clean(answer.sealed_under)}" if answer.sealed_under else "not encrypted"
        how = "erased" if answer.erased else sealed
        rows.append(("response", f"status {answer.status}, {answer.byte_size} bytes, {how}"))
    rows += [("step", _step(step)) for step in view.steps or ()]
    rows += [("changed", _change(change)) for change in changes]
    return Facts(tuple(rows))


def _change(view: ChangeView) -> str:
    """Return `2026-…: charge never-happened by ann, while quarantined: the bank has no such charge`."""
    step = "" if view.step is None else f"{clean(view.step)} "
    doubt = "" if view.certain else ", unless the store lost it"
    forced = ", by force" if view.forced else ""
    verb, was = clean(view.verb), clean(view.was)
    return f"{view.at}: {step}{verb} by {clean(view.actor)}{forced}{doubt}, while {was}: {clean(view.reason)}"


def _step(view: StepView) -> Styled:
    """Return `charge (plain): in doubt, attempt 2, began 2026-...`, without its result."""
    item = "" if view.item is None else f" of {clean(view.item)}"
    attempt = "an earlier attempt" if view.attempt is None else f"attempt {view.attempt}"
    when = f"began {view.began_at}" if view.finished_at is None else f"at {view.finished_at}"
    lost = "" if view.kept else ", result not kept"
    text = f"{clean(view.name)}{item} ({clean(view.effects)}): {view.state}{lost}, {attempt}, {when}"
    return Styled(text, Style.BAD if view.state == "in doubt" or not view.kept else None)
