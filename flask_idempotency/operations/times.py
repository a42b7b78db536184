"""Write times and durations for operators."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

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
