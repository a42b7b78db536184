"""Write times and durations for operators."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from math import inf
from typing import Final

from flask_idempotency.engine.activity import EDGES

_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def format_duration(seconds: float, *, units: int = 2) -> str:
    """Return a duration in its largest units: `14 min 48 s`, or in one `14 min`. Less than a second is `0 s`."""
    left = int(max(seconds, 0.0))
    parts: list[tuple[int, str]] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:units] if count) or "0 s"


def moment(epoch: float) -> str:
    """Return a time of the store's clock in UTC, to the millisecond."""
    return datetime.fromtimestamp(epoch, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(typed: str) -> float | None:
    """Return the seconds of a duration that a person typed: `90`, `90s`, `15m`, `2h`, `3d`. None: it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", typed, re.ASCII)
    return None if match is None else float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def epoch_of(typed: str) -> float | None:
    """Return the time that a person typed, in seconds since the epoch: `2026-01-15`, `2026-01-15T09:30`. None: it is none.

    It is in UTC unless it names another offset.
    """
    try:
        found = datetime.fromisoformat(typed)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def format_edge(seconds: float | None, *, over: str = "", none: str = "-") -> str:
    """Return an upper edge of a histogram as a person reads it: `7.5 ms`, `1.5 s`, `60 s` past the last.

    `over` stands before the last, if the true value is above it.
    """
    if seconds is None:
        return none
    if seconds == inf:
        return f"{over}{EDGES[-1]:g} s"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"
