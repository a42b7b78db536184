"""What an application can say about an outcome that nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flask_idempotency.engine.record import Record


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A quarantined record, as a resolver is shown it: what to ask the outside world about."""

    record: Record
    _downstream: Callable[[str], str] = field(repr=False)

    def downstream_key(self, name: str) -> str:
        """What `current_claim.downstream_key(name)` was in the view: ask the other side by it what it has done."""
        return self._downstream(name)


@dataclass(frozen=True, slots=True)
class Happened:
    """The work was done: retries get this answer from now on. It may be anything that a view may return."""

    answer: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class NeverHappened:
    """Nothing was done, and nothing of it is on its way any more: the key may run again.

    Only to be said of an outcome that the other side has *ruled out*. That it has not heard of it yet is `StillUnknown`.
    """


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """Ask again later."""


Resolution: TypeAlias = Happened | NeverHappened | StillUnknown
