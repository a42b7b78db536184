"""How a system of record is, and the cache of its answers before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from flask_idempotency.engine.capabilities import Finding, Health, Verdict
from flask_idempotency.engine.keys import StorageKey

_REMEDY: Final = "Check IDEMPOTENCY_REDIS_URL, and that its server runs and lets this host in."


class CachedHealth:
    """Implements `health.Health`: the system's findings, and whether the cache answers.

    `answers` looks for a key in the cache and says whether it answered, found or not. What it raises is its fault.
    """

    def __init__(self, health: Health | None, answers: Callable[[StorageKey], bool]) -> None:
        self._health = health
        self._answers = answers

    def findings(self) -> Sequence[Finding]:
        return [*(() if self._health is None else self._health.findings()), self._replays()]

    def _replays(self) -> Finding:
        try:
            answered = self._answers(StorageKey(os.urandom(32), os.urandom(16)))
        except Exception as error:  # noqa: BLE001 - the system's findings are worth having without it
            why = f"The cache of answers failed ({type(error).__name__})"
        else:
            if answered:
                return Finding("replays", Verdict.FINE, "The cache of answers answers.")
            why = "The cache of answers does not answer"
        return Finding("replays", Verdict.ADVICE, f"{why}: every replay is asked of the database.", _REMEDY)
