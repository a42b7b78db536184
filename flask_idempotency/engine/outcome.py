"""How asking for a claim can end: values, not exceptions.

The same answers are given twice. A store fills them with a `Grant` and a `Record`; the engine, one floor up, with a
`Claim` that can be settled and a `Result` that can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

HeldT = TypeVar("HeldT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a store gives the winner. `fence` rises for ever on one key; `token` is compared for equality only."""

    token: bytes = field(repr=False)
    fence: int
    attempt: int
    lease: float
    """Seconds left on the store's clock when it answered."""
    era: int = 0
    """Another number after each loss of the store's memory, where it can lose it: it is compared for equality only."""


@dataclass(frozen=True, slots=True)
class Claimed(Generic[HeldT]):
    """Yours: do the work, then settle it."""

    held: HeldT


@dataclass(frozen=True, slots=True)
class Replayed(Generic[AnswerT]):
    """Done before, by the same request: give this answer again."""

    answer: AnswerT


@dataclass(frozen=True, slots=True)
class InFlight:
    """The same request is running now. `retry_after` is what is left of its lease, in seconds; renewal may extend it."""

    retry_after: float


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key was used for another request, first seen at this time (seconds since the epoch, store's clock)."""

    first_seen: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody knows what became of the work. It will not run again until somebody settles it."""

    reason: str


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The tenant has as much as it may, so a new key is not granted. Nothing was written; known keys still pass."""

    limit: str
    """A key of `quota.LIMITS`: the first limit that is reached."""
    allowed: int
    retry_after: float = 0.0
    """Seconds until something of it may be free again, as far as the store can tell; 0 where it cannot."""
    window: float | None = None
    """Of a limit on new keys: its length in seconds."""


@dataclass(frozen=True, slots=True)
class Erased:
    """Done before, by the same request, and its answer was erased with its tenant's data key. It never runs again."""
