"""Keys that wait: for a person, for a janitor, or for a retry."""

from __future__ import annotations

from typing import Final

from flask_idempotency.engine.capabilities import Finding, Unsettled, Verdict
from flask_idempotency.engine.model import OnLapse
from flask_idempotency.operations.spelling import span

PATIENCE_SECONDS: Final = 60.0
"""Six turns of a janitor with its default settings."""

RETRIED_SECONDS: Final = 3600.0
"""A client that retries does so within minutes; one that has not for an hour has given up."""

LOOKED_AT: Final = 2000
"""As many as a moment allows. More are not counted: some are enough to act."""

_SHEET: Final = 200


def quarantined(unsettled: Unsettled) -> list[Finding]:
    """Whether somebody's outcome is unknown, and since when."""
    standing = unsettled.standing()
    if not standing.quarantined:
        return [Finding("quarantined", Verdict.FINE, "No key is quarantined.")]
    text = (
        f"{_keys(standing.quarantined)} quarantined, the first for {span(standing.quarantined_for or 0.0)}: nobody knows what "
        "became of the work, and retries are refused until a resolver or a person settles it."
    )
    remedy = (
        "Look with `flask idempotency list --state quarantined`, ask the other side, and say what happened with "
        "`flask idempotency resolve`."
    )
    return [Finding("quarantined", Verdict.ADVICE, text, remedy)]


def lapsed(unsettled: Unsettled, *, now: float) -> list[Finding]:
    """Whether claims of vanished owners are left where they are. `now` is the store's."""
    overdue, forgotten, looked, after = 0, 0, 0, b""
    while looked < LOOKED_AT:
        sheet = unsettled.stale(horizon=now - PATIENCE_SECONDS, after=after, limit=_SHEET)
        for found in sheet.found:
            if found.record.on_lapse is OnLapse.QUARANTINE:
                overdue += 1
            elif found.record.remaining < -RETRIED_SECONDS:
                forgotten += 1
        looked += _SHEET
        if sheet.after is None:
            break
        after = sheet.after
    findings = []
    if overdue:
        text = (
            f"{_keys(overdue)} without an owner for more than {span(PATIENCE_SECONDS)}, and no janitor has quarantined them: "
            "no resolver is asked, and nobody is told, until a retry comes."
        )
        remedy = "Run `flask idempotency reap`, and see that a janitor does so from now on."
        findings.append(Finding("lapsed", Verdict.FAULT, text, remedy))
    if forgotten:
        text = (
            f"{_keys(forgotten)} waiting to be taken over by a retry that has not come for more than "
            f"{span(RETRIED_SECONDS)}: nobody can tell whether the work was done, and nothing but a retry ends this."
        )
        remedy = (
            "Look with `flask idempotency list --state processing`, and free what nobody will retry with "
            "`flask idempotency release`."
        )
        findings.append(Finding("lapsed", Verdict.ADVICE, text, remedy))
    return findings or [Finding("lapsed", Verdict.FINE, "No claim of a vanished owner is left where it should not be.")]


def _keys(number: int) -> str:
    return f"{number} key is" if number == 1 else f"{number} keys are"
