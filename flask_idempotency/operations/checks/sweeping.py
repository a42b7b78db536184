"""Whether the janitor comes, does everything, and keeps up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flask_idempotency.engine.capabilities import Entry, Finding, Verdict
from flask_idempotency.operations.spelling import span

MISSED: Final = 3
"""So many intervals of a chore pass without it before that is worth a word: one may be late, and one unlucky."""

SOON_SECONDS: Final = 600.0
"""A chore that is due less often than this may not have had its turn since the janitor was first started."""

_START = (
    "Start a janitor (`celery -A flask_idempotency.janitor worker -B`), or have cron run `flask idempotency reap` and "
    "`flask idempotency expire`. If there is to be none, set IDEMPOTENCY_HEARTBEAT_EVERY to None."
)


def janitor(last: Mapping[str, Entry], *, heartbeat_every: float | None) -> list[Finding]:
    """Whether anybody has swept lately. Any chore counts, whoever did it: cron has no heartbeat."""
    if heartbeat_every is None:
        return [Finding("janitor", Verdict.FINE, "No janitor is expected: IDEMPOTENCY_HEARTBEAT_EVERY is None.")]
    silence = min((entry.ago for entry in last.values()), default=None)
    if silence is None:
        return [Finding("janitor", Verdict.FAULT, "No janitor has ever reported to this store.", _START)]
    if silence > 2 * heartbeat_every:
        text = f"No janitor has reported for {span(silence)}, and one is expected every {span(heartbeat_every)}."
        return [Finding("janitor", Verdict.FAULT, text, _START)]
    return [Finding("janitor", Verdict.FINE, f"A janitor reported {span(silence)} ago.")]


def chores(last: Mapping[str, Entry], *, every: Mapping[str, float], patience: float) -> list[Finding]:
    """Whether each chore that is done by itself has had its turns. `every` has their intervals in seconds.

    None is late before the janitor itself would be missed, which is after `patience` seconds: cron comes once a minute.
    """
    found = []
    for chore, seconds in every.items():
        entry = last.get(chore)
        remedy = (
            f"See why in the janitor's log, or run `flask idempotency {chore}` by hand. If it is meant to be done less often, "
            f"set IDEMPOTENCY_{chore.upper()}_EVERY to that."
        )
        if entry is None:
            if seconds <= SOON_SECONDS and last:
                text = f"The chore {chore} is due every {span(seconds)}, and was never done."
                found.append(Finding("chores", Verdict.ADVICE, text, remedy))
        elif entry.ago > max(MISSED * seconds, patience):
            text = f"The chore {chore} is due every {span(seconds)}, and was last done {span(entry.ago)} ago."
            found.append(Finding("chores", Verdict.FAULT, text, remedy))
    return found or [Finding("chores", Verdict.FINE, "Every chore that was done once has had its turns since.")]


def backlog(last: Mapping[str, Entry]) -> list[Finding]:
    """Whether a chore was cut short by its budget the last time."""
    cut = sorted(chore for chore, entry in last.items() if entry.facts().get("finished") is False)
    if not cut:
        return [Finding("backlog", Verdict.FINE, "Every chore came to its end the last time.")]
    text = f"The last run of {', '.join(cut)} had to end before its work did: there is more to do than its interval allows."
    remedy = (
        f"Run `flask idempotency {cut[0]}` once by hand. If it stays so, do it more often (IDEMPOTENCY_{cut[0].upper()}_EVERY)"
        + (", or let it remove more in a second (IDEMPOTENCY_EXPIRE_RATE)." if "expire" in cut else ".")
    )
    return [Finding("backlog", Verdict.ADVICE, text, remedy)]
