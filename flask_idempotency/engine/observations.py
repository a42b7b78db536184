"""Remember the keys of requests that run in observe mode, to tell what enforcing would have done with each.

An observation grants nothing and refuses nothing. It is kept apart from records, so a claim never finds it.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.values import valueclass

__all__ = ["Ending", "Observations", "Observed", "Sighting"]


class Sighting(Enum):
    """What a request in observe mode found under its key."""

    NEW = "new"
    """No request, or one that was released or has expired. This request is the one to watch now."""
    TAKEN_OVER = "taken-over"
    """A request whose lease expired, and `hold_lapsed` was False. This request is the one to watch now."""
    REPLAY = "replay"
    """A request that ended, and would have been stored."""
    CONFLICT = "conflict"
    """A request that runs."""
    MISMATCH = "mismatch"
    """Another request: the fingerprints differ."""
    UNKNOWN = "unknown"
    """A request that would have been quarantined."""


class Ending(Enum):
    """What enforcing would have made of the record when the request ended."""

    KEPT = "kept"
    RELEASED = "released"
    QUARANTINED = "quarantined"


@valueclass(frozen=True, slots=True)
class Observed:
    """What a request found under its key. `first_seen_ago`: seconds since the watched request began; 0 for a new one."""

    sighting: Sighting
    first_seen_ago: float = 0.0


class Observations(Protocol):
    """Remembers which keys were seen in observe mode. Found as `observations`.

    Never holds a body, a header or a status. Every method raises `StoreUnavailable` if the store does not answer.
    """

    def observe(
        self, key: StorageKey, *, token: bytes, fingerprint: bytes, lease: float, keep: float, hold_lapsed: bool
    ) -> Observed:
        """Note that a request with this key began, and return what it found. One atomic step by the store's clock.

        It classifies as a claim does: an expired observation is absent; then the fingerprint, then the state. A request that
        finds none, or one whose lease expired with `hold_lapsed` False, becomes the watched one under its 16-byte `token`,
        for `lease` seconds. With `hold_lapsed`, an expired lease makes the observation `UNKNOWN` for `keep` seconds.
        The same token again finds what it found before. The store forgets a watched request that never ends after
        `lease` + `keep` seconds.
        """
        ...

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        """Extend the lease of the watched request to at least `lease` seconds from now. Harmless under another token."""
        ...

    def end(self, key: StorageKey, token: bytes, ending: Ending, *, keep: float) -> None:
        """Note how the watched request ended, and remember that for `keep` seconds. Harmless under another token.

        `RELEASED` forgets the observation now.
        """
        ...
