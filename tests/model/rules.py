"""Which rules are in force, and what may befall whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Effects: TypeAlias = Literal["plain", "marked", "deduplicated", "transactional"]
Accident: TypeAlias = Literal["wiped", "set back", "mistaken", "restarted", "older files"]
"""The store forgets everything; another server goes on with a copy of any age; another store is asked in its place; the store
restarts and keeps everything; it restarts with a copy of its files of any age."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`broken` names those that are left out, to see that they were needed."""

    effects: Effects = "plain"
    takeover: bool | None = None
    workers: int = 3
    attended: bool = True
    """Whether there are a janitor and a resolver."""
    forced: bool = False
    """Whether a person may free a key whose owner may be alive."""
    accidents: tuple[Accident, ...] = ()
    """What befalls the store, in this order, each at any time or never."""
    lossless: bool = False
    """Whether the store was seen to lose nothing in a restart."""
    unattended: bool = False
    """Whether no operator ever acknowledges a loss."""
    quick: bool = False
    """Whether files are put back as fast as a restart takes."""
    unknown: Literal["refuse", "hold", "run"] = "refuse"
    """What becomes of keys that the store does not know after a loss: until an operator acknowledges it, or for a while."""
    hasty: bool = False
    """Whether an operator acknowledges a loss before every owner has its record again."""
    careless: bool = False
    """Whether an operator acknowledges a loss while what was done and forgotten is still retried."""
    packets: bool = False
    """Whether what was sent to the store may arrive late, and twice."""
    timed: Literal["no", "well", "fast"] = "no"
    """Whether keys say when they were made; and if so, whether the client's clock is fast."""
    faithful: bool = False
    """Whether a resolver's answer is the very one that whoever did the work would have given."""
    broken: frozenset[str] = field(default_factory=frozenset)

    @property
    def takes_over(self) -> bool:
        return self.effects != "plain" if self.takeover is None else self.takeover

    def token(self, number: int) -> int:
        return 0 if "one token for all" in self.broken else number
