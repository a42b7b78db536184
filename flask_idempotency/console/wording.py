"""Write names, times and numbers into pages: escaped, bounded, and in the words of the commands."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape

from flask_idempotency.engine.escape import printable, printable_lines
from flask_idempotency.operations.records import Condition, RecordView
from flask_idempotency.operations.times import epoch_of, format_duration, moment

LONGEST_NAME: Final = 80
"""Characters of a name that a page shows. The rest is in its title."""
LONGEST_TITLE: Final = 1000
LONGEST_TEXT: Final = 4000
"""Characters of any other text that a page shows."""

MOST_MARKS: Final = 4
"""Marks on one letter. Vietnamese has two, and Hebrew and Arabic with all their signs up to four."""

NONE: Final = Markup('<span class="none">–</span>')


def finalize(value: Any) -> Any:
    """Return what a template prints. Text from anywhere is made printable and bounded here; Jinja escapes it."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    return bounded(readable(str(value)), LONGEST_TEXT) if isinstance(value, str) else value


def readable(text: str) -> str:
    """Return the text with signs for what cannot be seen, and for marks that would stand in other lines of the page.

    A letter may have any number of marks above and below it. The first `MOST_MARKS` of them stay marks.
    """
    text = printable(text)
    if text.isascii():
        return text
    parts, marks = [], 0
    for each in text:
        marks = marks + 1 if unicodedata.category(each) in ("Mn", "Me") else 0
        parts.append(each if marks <= MOST_MARKS else f"\\u{ord(each):04x}")
    return "".join(parts)


def bounded(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def name(value: str | None, most: int = LONGEST_NAME) -> Markup:
    """Return a name that an application or a client chose: apart from the direction of the text around it, and cut."""
    if not value:
        return NONE
    # Cut before escaping too: a name of a megabyte costs nothing.
    whole = readable(value[: LONGEST_TITLE + 1])
    if whole != whole.strip():
        whole = f'"{whole}"'  # a reader would not see that it begins or ends with spaces
    if len(whole) <= most:
        return Markup("<bdi>{}</bdi>").format(whole)
    return Markup('<bdi class="cut" title="{}">{}</bdi>').format(bounded(whole, LONGEST_TITLE), bounded(whole, most))


def whole(value: str) -> Markup:
    """Return a text as it is, escaped: a form carries it from one page to the next."""
    return escape(value)


def lines(value: str) -> Markup:
    """Return the beginning of a text of several lines."""
    return escape(bounded(printable_lines(value.replace("\r\n", "\n")), LONGEST_TEXT))


def ago(seconds: float | None, units: int = 1) -> str:
    return "–" if seconds is None else f"{format_duration(seconds, units=units)} ago"


def duration(seconds: float | None, units: int = 2) -> str:
    """Return a duration, in milliseconds below a second."""
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 1 else format_duration(seconds, units=units)


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def now_of(view: RecordView) -> float:
    """Return the store's time when this record was read, in seconds since the epoch."""
    return (epoch_of(view.requested_at) or 0.0) + view.first_used_ago


def when(at: str | float | None, now: float | None = None) -> Markup:
    """Return a time of the store as people read it: `14:02:31, 41 min ago`, with the day if that is another one than now.

    The exact time is its title, and what screen readers read.
    """
    seconds = epoch_of(at) if isinstance(at, str) else at
    if seconds is None:
        return NONE
    time, exact = datetime.fromtimestamp(seconds, tz=UTC), moment(seconds)
    today = None if now is None else datetime.fromtimestamp(now, tz=UTC)
    day = "" if today is not None and today.date() == time.date() else f"{time.day} {time:%b} "
    day += f"{time.year} " if day and (today is None or today.year != time.year) else ""
    away = 0.0 if now is None else now - seconds
    rest = "" if now is None else f", {ago(away)}" if away >= 0 else f", in {format_duration(-away, units=1)}"
    shown = Markup(
        '<time datetime="{0}" title="{0}"><span aria-hidden="true">{1}</span><span class="sr">{0}</span></time>{2}'
    )
    return shown.format(exact, f"{day}{time:%H:%M:%S}", rest)


def state(condition: Condition) -> Markup:
    return Markup('<span class="state {}">{}</span>').format(condition.tone, condition.value)


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    each.__name__: each for each in (name, whole, lines, ago, duration, number, state, now_of, when)
}
