"""The log and the locks of maintenance tasks."""

from __future__ import annotations

from collections.abc import Mapping

from flask_idempotency.engine.tasks import LONGEST_LOCK_SECONDS, TaskReport
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.executor import RedisCapability, text_in, whole_number


class RedisTaskLog(RedisCapability):
    """Implement `capabilities.TaskLog`. A full Redis still accepts these writes, so that reports stay current."""

    def now(self) -> float:
        return self._server.now()

    def report(self, task: str, report: str) -> None:
        self._server.run(scripts.TASK_REPORT, (layout.TASKS,), task.encode(), report.encode())

    def reports(self) -> Mapping[str, TaskReport]:
        now, pairs = self._server.run(scripts.TASK_REPORTS, (layout.TASKS,))
        notes = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return {text_in(task): _report(note, now) for task, note in notes.items()}

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        longest = microseconds(LONGEST_LOCK_SECONDS)
        result = self._server.run(scripts.TASK_LOCK, (layout.task_lock(task),), token, microseconds(lease), longest)
        return bool(result == b"TAKEN")

    def unlock(self, task: str, token: bytes) -> None:
        self._server.run(scripts.TASK_UNLOCK, (layout.task_lock(task),), token)


def _report(note: bytes, now: int) -> TaskReport:
    at, _, report = note.partition(b" ")
    return TaskReport(max(now - whole_number(at), 0) / 1_000_000, text_in(report))
