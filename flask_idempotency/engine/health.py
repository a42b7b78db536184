"""What a store can say about itself to somebody who asks whether all is well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable


class Verdict(Enum):
    """How serious a finding is."""

    FINE = "fine"
    ADVICE = "advice"
    """No promise is broken, and something would be better otherwise."""
    UNKNOWN = "unknown"
    """It could not be looked at; the text says why, and how it can."""
    FAULT = "fault"
    """A promise does not hold, or will not when something goes wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of `flask idempotency doctor`, and what came of it."""

    check: str
    """A short name, such as `eviction`: always the same, for scripts."""
    verdict: Verdict
    text: str
    """What was found, in one sentence. Names no key, tenant, password or URL."""
    remedy: str = ""
    """What to do about it, in one sentence. Empty when all is fine."""


class Health(Protocol):
    """Found as `health`."""

    def findings(self) -> Sequence[Finding]:
        """Look at what this store depends on: how its server is configured, its tables, its persistence. Changes nothing.

        Raises `StoreUnavailable` when the store cannot answer at all.
        """
        ...


@runtime_checkable
class KnowsItsHealth(Protocol):
    """A store that can be asked how it is."""

    @property
    def health(self) -> Health: ...
