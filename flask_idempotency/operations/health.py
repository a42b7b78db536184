"""Keep what the last look at Health found in the store, so that the console shows the same whichever process answers.

`stats` prints it too. A look at Health asks the store many questions, so no other page takes one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.tasks import LONGEST_REPORT, TaskLog
from flask_idempotency.operations.examination import DoctorReport

HEALTH: Final = "health:"
"""Begins the name of its report. The mark of the application follows, without the `@` that tasks have before it."""
MOST_FAULTS: Final = 10
LONGEST_FAULT: Final = 300
"""Characters of a fault. `MOST_FAULTS` of these fit into a report."""


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """What the last look at Health found. `faults` are the names of checks, and texts."""

    ago: float
    in_order: bool
    complete: bool
    faults: tuple[tuple[str, str], ...]


def keep_health(log: TaskLog, owner: bytes, report: DoctorReport) -> None:
    """Keep the faults of this report in the store, for the application with this mark."""
    faults = [(each.check, each.text[:LONGEST_FAULT]) for each in report.findings if each.verdict is Verdict.FAULT][
        :MOST_FAULTS
    ]
    while len(kept := json.dumps([report.in_order, report.complete, faults])) > LONGEST_REPORT and faults:
        faults.pop()
    log.report(HEALTH + owner.hex(), kept)


def kept_health(log: TaskLog, owner: bytes) -> KeptHealth | None:
    """Return what the last look found. None: there was none, or another release wrote what this one cannot read."""
    entry = log.reports().get(HEALTH + owner.hex())
    try:
        in_order, complete, faults = json.loads("null" if entry is None else entry.report[:LONGEST_REPORT])
        read = tuple((printable(str(check)), printable(str(text))) for check, text in faults)
    except (ValueError, TypeError, RecursionError):
        return None
    return None if entry is None else KeptHealth(entry.ago, in_order is True, complete is True, read)
