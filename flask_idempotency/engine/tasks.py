"""The log of maintenance tasks. Judge by it whether a janitor runs, and runs each of its tasks.

`doctor`, the console, the metrics and the monitor in each process ask here, so that they agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from flask_idempotency.engine.values import valueclass

LONGEST_REPORT: Final = 4000
_LARGEST_NUMBER: Final = 2**53

LONGEST_LOCK_SECONDS: Final = 2 * 3600.0
"""A store ignores a lock with more time left than this: it was taken before the clock was set back."""


@valueclass(frozen=True, slots=True)
class TaskReport:
    """When a maintenance task last reported, and its report."""

    ago: float
    """Seconds, by the store's clock."""
    report: str
    """JSON, at most 4,000 characters. Holds numbers and fixed words only: no key, tenant or body."""

    def facts(self) -> Mapping[str, Any]:
        """Return the fields of the report. Empty if it is too long or is not a JSON object."""
        if len(self.report) > LONGEST_REPORT:
            return {}
        try:
            facts = json.loads(self.report)
        except (ValueError, RecursionError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def whole(self, name: str) -> int | None:
        """Return this number of the report. None if it is missing, or larger than a task can report."""
        found = self.facts().get(name)
        return found if type(found) is int and abs(found) <= _LARGEST_NUMBER else None


class TaskLog(Protocol):
    """Records when maintenance tasks ran, so that you can see whether a janitor runs. Found as `task_log`.

    Task names are constants of this package, at most 40 characters. Every method raises `StoreUnavailable` if the store
    does not answer.
    """

    def now(self) -> float:
        """Return the store's time, in seconds since the epoch."""
        ...

    def report(self, task: str, report: str) -> None:
        """Record that this task ran just now. Replaces its last report."""
        ...

    def reports(self) -> Mapping[str, TaskReport]:
        """Return the last report of each task."""
        ...

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        """Lock this task for `lease` seconds, and return whether that worked. The same token renews its own lock.

        Use it to save work only; never rely on it for correctness. It ends with its lease. The store ignores a lock that
        would last longer than `LONGEST_LOCK_SECONDS` from now: another clock set its end.
        """
        ...

    def unlock(self, task: str, token: bytes) -> None:
        """Unlock this task now. Harmless if another janitor holds the lock."""
        ...


class OwnTaskLog:
    """Implements `TaskLog` for one application, in a store that several may share.

    It adds the application's mark to each task name. So a janitor of another application cannot hide that yours is missing.
    """

    def __init__(self, log: TaskLog, *, owner: bytes) -> None:
        """`owner`: the mark of the application."""
        self._log = log
        self._suffix = f"@{owner.hex()}"

    def now(self) -> float:
        return self._log.now()

    def report(self, task: str, report: str) -> None:
        self._log.report(task + self._suffix, report)

    def reports(self) -> Mapping[str, TaskReport]:
        reports = self._log.reports().items()
        return {name.removesuffix(self._suffix): entry for name, entry in reports if name.endswith(self._suffix)}

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        return self._log.lock(task + self._suffix, token, lease=lease)

    def unlock(self, task: str, token: bytes) -> None:
        self._log.unlock(task + self._suffix, token)


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
