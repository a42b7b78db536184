"""What a store does for those who look after it: remember when that was, let one do it at a time, and clear out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

LONGEST_REPORT: Final = 4000
_LARGEST_NUMBER: Final = 2**53

LONGEST_LOCK_SECONDS: Final = 2 * 3600.0
"""Nobody has a chore for as long: whoever does has taken it before the clock was set back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """When a chore was last reported, and what it said."""

    ago: float
    """Seconds, by the store's clock."""
    report: str
    """JSON, at most 4,000 characters. Holds numbers and words of ours, and nothing of a key, tenant or body."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says. Empty for one that no release of ours wrote: nothing in it is believed."""
        if len(self.report) > LONGEST_REPORT:
            return {}
        try:
            facts = json.loads(self.report)
        except (ValueError, RecursionError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def whole(self, name: str) -> int | None:
        """Return this number of the report. None if it is not there, or larger than any number that a chore reports."""
        found = self.facts().get(name)
        return found if type(found) is int and abs(found) <= _LARGEST_NUMBER else None


class ChoreBook(Protocol):
    """Where chores are written down, so that everybody knows whether the janitor comes. Found as `chores`.

    Names of chores are words of ours, at most 40 characters. Every method raises `StoreUnavailable` when the store cannot
    answer.
    """

    def now(self) -> float:
        """Seconds since the epoch, by the store's clock."""
        ...

    def note(self, chore: str, report: str) -> None:
        """Write down that this chore has run just now, over what was written before."""
        ...

    def last(self) -> Mapping[str, Entry]:
        """What was last written of each chore."""
        ...

    def take(self, chore: str, token: bytes, *, lease: float) -> bool:
        """Whether this chore is the caller's for `lease` seconds. With the same token it is so again, for as long.

        Nothing's correctness may hang on it: a lock saves work, and no more. It is over when the lease is; and one that is
        to last for longer than `LONGEST_LOCK_SECONDS` from now was taken by another clock, and is nobody's.
        """
        ...

    def give_back(self, chore: str, token: bytes) -> None:
        """Let the next one have it at once. Harmless when it is somebody else's."""
        ...


class OwnChores:
    """Implements `ChoreBook` for one application, in the book of a store that several may share.

    Each has a janitor of its own: one that only the others have must not keep it from being missed.
    """

    def __init__(self, book: ChoreBook, *, owner: bytes) -> None:
        """`owner`: the mark of the application."""
        self._book = book
        self._whose = f"@{owner.hex()}"

    def now(self) -> float:
        return self._book.now()

    def note(self, chore: str, report: str) -> None:
        self._book.note(chore + self._whose, report)

    def last(self) -> Mapping[str, Entry]:
        noted = self._book.last().items()
        return {name.removesuffix(self._whose): entry for name, entry in noted if name.endswith(self._whose)}

    def take(self, chore: str, token: bytes, *, lease: float) -> bool:
        return self._book.take(chore + self._whose, token, lease=lease)

    def give_back(self, chore: str, token: bytes) -> None:
        self._book.give_back(chore + self._whose, token)


class Expiry(Protocol):
    """Removes what nobody can see any more. Found as `expiry`."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Remove up to `limit` of what was over by this horizon, and is over now. Returns how many; 0 when none is left.

        That is: records whose answer's life has ended, keys that were released and are remembered no longer, entries of
        ledgers and indexes whose time is past. Never one that is PROCESSING or QUARANTINED, whatever the time. Several may
        sweep at once, and each thing is removed by one of them. A store that ends things by itself may return 0 at once.
        """
        ...


@runtime_checkable
class KeepsChoreBook(Protocol):
    """A store that remembers which chores were done."""

    @property
    def chores(self) -> ChoreBook: ...


@runtime_checkable
class Expires(Protocol):
    """A store that has to be cleared of what is over."""

    @property
    def expiry(self) -> Expiry: ...
