"""Judge by the task log whether a janitor runs, and runs each of its tasks.

`doctor`, the console, the metrics and the monitor in each process ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from flask_idempotency.engine.capabilities import TaskReport


def beating(last: Mapping[str, TaskReport]) -> float | None:
    """Return the seconds since the first heartbeat. None: there was none, as if cron runs the tasks."""
    entry = last.get("heartbeat")
    return None if entry is None else (entry.whole("beating_s") or 0) + entry.ago


class LateTask(NamedTuple):
    """A task that should run and does not."""

    task: str
    every: float
    """Seconds between two runs."""
    ago: float | None
    """Seconds since its last run. None: it never ran."""


MISSED: Final = 3
"""Intervals without a run until a task is late: one run may be late, and one unlucky."""


def late_tasks(
    last: Mapping[str, TaskReport], every: Mapping[str, float], *, heartbeat_interval: float
) -> list[LateTask]:
    """Return each task of `every` (seconds between two runs) that is late, judged by its own last run alone.

    No task is late before two heartbeat intervals: cron runs once a minute. One that never ran is late too, unless a janitor
    has been beating for less than that: it may be about to run it, and Celery's beat sends a daily task after a day.
    """
    late, since = [], beating(last)
    for task, seconds in every.items():
        patience, entry = max(MISSED * seconds, 2 * heartbeat_interval), last.get(task)
        if entry is not None and entry.ago > patience:
            late.append(LateTask(task, seconds, entry.ago))
        elif entry is None and (since is None or since > patience):
            late.append(LateTask(task, seconds, None))
    return late


def silence_of(last: Mapping[str, TaskReport]) -> float | None:
    """Return the seconds since any task of a janitor reported, or None. A relay is a process of its own, and no sign of one."""
    return min((entry.ago for task, entry in last.items() if task != "relay"), default=None)
