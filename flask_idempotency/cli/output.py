"""Print the output of a command: sentences, facts and tables, in plain lines and in colour.

Every text is escaped, because stores hold names that clients choose. A terminal gets those names shortened; no line is
wrapped. A colour only repeats what a word says. `NO_COLOR` and `TERM=dumb` turn it off; `FORCE_COLOR` turns it on for a pipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import click

from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.escape import printable, printable_lines
from flask_idempotency.engine.journal import MOST_TRIES
from flask_idempotency.operations.records import Condition, RecordView, StepView
from flask_idempotency.operations.times import format_duration, moment


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
    style: Style | None = None


Cell = str | Styled
Line = Cell | Sequence[Cell]
"""A text of one line or several; or texts beside each other, which are one line whatever is in them."""


def say(*lines: Line, err: bool = False) -> None:
    """Print these lines. Escape every control sequence in them."""
    stream = sys.stderr if err else sys.stdout
    colour = in_colour(err=err)
    text, encoding = "\n".join(_text(line, colour=colour) for line in lines or ("",)), stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeError:  # a pipe of Windows has few characters
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(text, err=err, color=colour)


def in_colour(*, err: bool = False) -> bool:
    """Return whether the reader of the standard output gets colour, or of the standard error."""
    wanted = (sys.stderr if err else sys.stdout).isatty() or bool(os.environ.get("FORCE_COLOR"))
    return wanted and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _text(line: Line, *, colour: bool) -> str:
    if isinstance(line, str | Styled):
        return _painted(_styled(line, printable_lines), colour=colour)
    return "".join(_painted(_styled(cell), colour=colour) for cell in line).rstrip(" ")


def _styled(cell: Cell, escape: Callable[[str], str] = printable) -> Styled:
    return Styled(escape(cell)) if isinstance(cell, str) else Styled(escape(cell.text), cell.style)


def _painted(piece: Styled, *, colour: bool) -> str:
    return f"\x1b[{piece.style.value}m{piece.text}\x1b[0m" if colour and piece.style and piece.text else piece.text


_ASCII: Final = str.maketrans({"…": "...", "→": ">"})


# Tables and facts.


def table(rows: Iterable[Mapping[str, Cell]], *, without: Collection[str] = ()) -> list[Line]:
    """Return rows as lines below the names of their columns. Leave out the columns `without`."""
    named = [{name: _styled(cell) for name, cell in row.items() if name not in without} for row in rows]
    if not named:
        return []
    every = [[Styled(printable(name), Style.HEAD) for name in named[0]], *(list(row.values()) for row in named)]
    widths = [max(len(cell.text) for cell in column) + 2 for column in zip(*every, strict=True)]
    return [
        [piece for cell, width in zip(row, widths, strict=True) for piece in (cell, " " * (width - len(cell.text)))]
        for row in every
    ]


def facts(rows: Iterable[tuple[str, Cell]], *, width: int = 14) -> list[Line]:
    """Return lines of a name and a value. `width` is that of the longest name, its colon and a space."""
    return [[f"{printable(name) + ':':<{width}}", value] for name, value in rows]


# Names, times and records.

NAME_CHARACTERS: Final = 48
"""The most that a terminal shows of a name which a client may choose."""


def clean(text: str | None) -> str:
    """Return this text with control characters escaped: names come from clients."""
    return "-" if text is None else printable(text) or "-"


def short_name(text: str | None) -> str:
    """Return the name of a tenant or caller, escaped, and short on a terminal: a client may choose it, and a long one would
    wrap into a line that looks like another. A pipe and `--json` get it whole."""
    name = clean(text)
    return name if len(name) <= NAME_CHARACTERS or not sys.stdout.isatty() else name[: NAME_CHARACTERS - 1] + "…"


def ago(seconds: float | None, *, units: int = 2) -> str:
    """Return `3 min 12 s ago`, or in one unit `3 min ago`."""
    return "-" if seconds is None else f"{format_duration(seconds, units=units)} ago"


_OF_TONES: Final = {"bad": Style.BAD, "warning": Style.WARNING, "good": Style.GOOD}


def state_of(view: RecordView) -> Styled:
    """Return the state of a record as an operator sees it, and its colour."""
    return Styled(view.condition.value, _OF_TONES.get(view.condition.tone))


def facts_of(view: RecordView, changes: Sequence[AuditEntry] = ()) -> list[Line]:
    """Return a record as an operator reads it, one fact a line. `changes` are those of its audit trail."""
    state, reason = state_of(view), f" ({view.reason})" if view.reason else ""
    rows: list[tuple[str, Cell]] = [
        ("id", view.handle),
        ("in logs", view.record),
        ("state", Styled(state.text + reason, state.style)),
        ("request", f"{clean(view.method)} {clean(view.endpoint)}"),
        ("tenant", short_name(view.tenant)),
        ("principal", short_name(view.principal)),
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
        if view.tries:
            gave_up = "; finish-gave-up: only its client finishes it now" if view.tries >= MOST_TRIES else ""
            rows.append(("janitor", f"tried to finish it {view.tries} of {MOST_TRIES} times{gave_up}"))
        rows += [("lease", lease), ("owner", f"last seen {ago(view.owner.last_seen_ago)}, {runs}")]
    if view.completed_at is not None:
        rows.append(("completed", f"{view.completed_at}, after {view.duration or 0.0:.3f} s"))
    if view.expires_at is not None:
        rows.append(("kept until", view.expires_at))
    if view.remembered_until is not None:
        rows.append(("known until", view.remembered_until))
    if (answer := view.answer) is not None:
        sealed = f"encrypted under {clean(answer.sealed_under)}" if answer.sealed_under else "not encrypted"
        how = "erased" if answer.erased else sealed
        rows.append(("response", f"status {answer.status}, {answer.byte_size} bytes, {how}"))
    rows += [("step", _step(step)) for step in view.steps or ()]
    rows += [("changed", _change(change)) for change in changes]
    return facts(rows)


def _change(entry: AuditEntry) -> str:
    """Return `2026-…: charge never-happened by ann, while quarantined: the bank has no such charge`."""
    step = f"{clean(entry.step)} " if entry.step else ""
    doubt = "" if entry.certain else ", unless the store lost it"
    forced = ", by force" if entry.forced else ""
    verb, was = clean(entry.verb), clean(entry.was)
    return (
        f"{moment(entry.at)}: {step}{verb} by {clean(entry.actor)}{forced}{doubt}, while {was}: {clean(entry.reason)}"
    )


def _step(view: StepView) -> Styled:
    """Return `charge (plain): in doubt, attempt 2, began 2026-...`, without its result."""
    item = "" if view.item is None else f" of {clean(view.item)}"
    attempt = "an earlier attempt" if view.attempt is None else f"attempt {view.attempt}"
    when = f"began {view.began_at}" if view.finished_at is None else f"at {view.finished_at}"
    lost = "" if view.kept else ", result not kept"
    text = f"{clean(view.name)}{item} ({clean(view.effects)}): {view.state}{lost}, {attempt}, {when}"
    return Styled(text, Style.BAD if view.state == "in doubt" or not view.kept else None)
