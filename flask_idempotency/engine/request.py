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
