"""What a door must bring to ask for a claim."""

from __future__ import annotations

from dataclasses import dataclass, field

from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.record import NOBODY, About, OnLapse


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Asks to work on a key. Frozen when asked: what the view later does to its request changes nothing here."""

    key: StorageKey
    fingerprint: bytes = field(repr=False)
    on_lapse: OnLapse
    about: About = NOBODY
    awaited: bool = False
    """Whether duplicates may wait for its answer: a store that can shall tell them when the key is settled."""
    born: float | None = None
    """When the client made its key, in seconds since the epoch by the client's clock, if the key says so."""
    counted: bool = True
    """Whether a quota applies to this name of the key."""
