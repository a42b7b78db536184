"""Find the requests that stopped between two steps and that no client retries, and finish those that are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, TypeAlias

from flask_idempotency.engine.capabilities import Recovery, SeenRecord
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.journal import MOST_TRIES, Journal, Journals
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.maintenance.janitor import Batcher, BatchResult, RunReport

PAUSES_SECONDS: Final = (0.0, 30.0, 120.0, 600.0, 3600.0)
"""The pause before each try: before the first since the lease ended, before each other since the last try began."""

MOST_ATTEMPTS: Final = 50
"""A request that was claimed so often is left to its client. A claim that begins no try, such as one of a request that another
host has finished, counts as no try and puts off the end of the record: a janitor that cron starts would go on for ever."""

GAVE_UP: Final = "finish-gave-up"
"""What `show` and the audit trail call a request whose tries are used up."""

_LOOKS_AGAIN_SECONDS: Final = {
    "overtaken": PAUSES_SECONDS[-1],
    "unreadable": PAUSES_SECONDS[-1],
    "failed": PAUSES_SECONDS[2],
}
"""When to look again at a record whose token is still the same. The first two would end as before; the last failed before its
try could be recorded, so no pause of a try follows."""

Tried: TypeAlias = Literal["completed", "failed", "gave_up", "quarantined", "overtaken", "unreadable", "waiting"]
"""How a try ended: a count in `FinishReport`."""


@dataclass(frozen=True, slots=True)
class FinishReport(RunReport):
    """The result of one run of `finish`."""

    completed: int = 0
    """Requests whose response the store has now."""
    failed: int = 0
    """Tries that did not get so far. The request waits for its next try, or for its client."""
    gave_up: int = 0
    """Tries that failed, and were the last of their request."""
    quarantined: int = 0
    """Requests that the try has quarantined, such as with a step in doubt."""
    overtaken: int = 0
    """The client or another janitor has the request, or it ended."""
    waiting: int = 0
    """Requests whose next try is not due yet, or that have none left, or whose encryption keys cannot be had now."""
    unreadable: int = 0
    """Requests that cannot be read, that stopped before the newest secret was added, or whose secret is not listed any more."""


def next_try(journal: Journal, *, ended: float, within: float) -> float:
    """Return when this request is tried next, in seconds since the epoch by the store's clock.

    Infinite: all tries are used up, the request is not kept, or no effect of it is recorded. `ended` is when its lease ended.
    No try begins `within` seconds or more after the first one was due.
    """
    tries = journal.tries
    kept = journal.kept_request is not None and any(entry.has_effect for entry in journal.entries)
    if not kept or len(tries) >= MOST_TRIES:
        return inf
    first, last = (tries[0].began_at, tries[-1].began_at) if tries else (ended, ended)
    due = max(last + PAUSES_SECONDS[len(tries)], ended)
    return due if due < first + within else inf


def finish(
    recovery: Recovery,
    journals: Journals,
    *,
    horizon: float,
    drain: Batcher,
    within: Callable[[SeenRecord], float | None],
    attempt: Callable[[SeenRecord, Journal], Tried],
    later: dict[bytes, tuple[bytes, float]],
) -> FinishReport:
    """Try to finish each request that is due by this horizon (seconds since the epoch, store's clock).

    `within` returns for how many seconds after the end of its lease a record is finished; None for one that is not ours to
    finish. `attempt` claims the record as a retry would, so two janitors, or a janitor and a client, never run together.
    `later` keeps from run to run which journals need no look: by the id of the record its token, and until when.

    Raises `StoreUnavailable` if the store does not answer; what was finished until then stays so.
    """
    counts: Counter[str] = Counter()
    seen: dict[bytes, tuple[bytes, float]] = {}
    left: list[SeenRecord] = []
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        # One request in each step, because its view may be slow.
        nonlocal cursor
        if not left and cursor is not None:
            page = recovery.expired_leases(horizon=horizon, after=cursor, limit=limit)
            left.extend(found for found in page.found if found.record.on_expiry is OnExpiry.TAKEOVER)
            cursor = page.after
        touched = 0
        while left and not touched:
            found = left.pop(0)
            if (seconds := within(found)) is not None:
                outcome = one(found, seconds)
                counts[outcome] += 1
                if outcome in _LOOKS_AGAIN_SECONDS:
                    seen[found.key.rid] = found.record.token, horizon + _LOOKS_AGAIN_SECONDS[outcome]
                touched = outcome != "waiting"
        return BatchResult(int(touched), more=bool(left) or cursor is not None)

    def one(found: SeenRecord, seconds: float) -> str:
        record, rid = found.record, found.key.rid
        token, until = later.get(rid, (b"", 0.0))
        if token == record.token and until > horizon:
            seen[rid] = token, until
            return "waiting"
        if record.attempt >= MOST_ATTEMPTS:
            seen[rid] = record.token, inf
            return "waiting"
        try:
            journal = journals.read(found.key)
        except CorruptRecord:
            return "unreadable"
        due = next_try(journal, ended=record.deadline, within=seconds)
        if due > horizon or record.deadline + seconds <= horizon:
            seen[rid] = record.token, due
            return "waiting"
        return attempt(found, journal)

    report = drain.run(step)
    if report.finished:
        later.clear()
    later.update(seen)
    return FinishReport(**counts, shrunk=report.shrunk, finished=report.finished)
