"""Whether the clocks agree, and whether somebody has set one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from flask_idempotency.engine.capabilities import ChoreBook, Entry, Finding, Verdict

NOTICED_SECONDS: Final = 1.0
"""As far apart as hosts with NTP are not."""

FAR_SECONDS: Final = 30.0
"""A default lease: a clock that is set by this much ends all of them at once."""

_SYNC = "Keep all clocks in step with NTP (`timedatectl status` on both machines)."


def clock_skew(book: ChoreBook, *, host_clock: Callable[[], float] = time.time) -> list[Finding]:
    """How far the store's clock is from this host's. However long the store takes to answer is no skew."""
    before = host_clock()
    store_now = book.now()
    after = host_clock()
    apart = max(store_now - after, before - store_now, 0.0)
    if apart <= NOTICED_SECONDS:
        return [Finding("clock-skew", Verdict.FINE, "The store's clock and this host's agree.")]
    verdict = Verdict.FAULT if apart > FAR_SECONDS else Verdict.ADVICE
    which = "ahead of" if store_now > after else "behind"
    text = (
        f"The store's clock is {apart:.1f} s {which} this host's. Leases and answers' lives go by the store's alone, so no "
        "work is repeated for this; but whoever sets that clock right by a jump ends or prolongs all of them."
    )
    return [Finding("clock-skew", verdict, text, _SYNC)]


def clock_step(book: ChoreBook) -> list[Finding]:
    """Whether the last two heartbeats have seen the clocks move against each other."""
    stepped = _stepped_seconds(book.last().get("heartbeat"))
    if stepped is None:
        return [Finding("clock-step", Verdict.FINE, "No heartbeat has compared the clocks yet.")]
    if abs(stepped) <= NOTICED_SECONDS:
        return [Finding("clock-step", Verdict.FINE, "By the last two heartbeats nobody has set a clock.")]
    verdict = Verdict.FAULT if abs(stepped) > FAR_SECONDS else Verdict.ADVICE
    text = (
        f"Between the last two heartbeats the store's clock moved by {stepped:+.1f} s against its janitor's: somebody has "
        "set one of them, or two janitors' hosts disagree. A store's clock that jumps forward ends leases and lives early."
    )
    remedy = f"{_SYNC} If leases have ended: `flask idempotency list --state quarantined`."
    return [Finding("clock-step", verdict, text, remedy)]


def _stepped_seconds(entry: Entry | None) -> float | None:
    stepped = None if entry is None else entry.whole("stepped_ms")
    return None if stepped is None else stepped / 1000
