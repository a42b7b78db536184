"""Removing what nobody can see any more."""

from __future__ import annotations

from dataclasses import dataclass

from flask_idempotency.engine.capabilities import Expiry
from flask_idempotency.maintenance.drain import Did, Drain


@dataclass(frozen=True, slots=True)
class Expiration:
    """What one run has removed."""

    removed: int = 0
    shrunk: int = 0
    finished: bool = True


def expire(expiry: Expiry, *, horizon: float, drain: Drain) -> Expiration:
    """Remove what was over by this horizon (seconds since the epoch, store's clock).

    What ends meanwhile is left for the next run, so that this one ends. Never touches what is PROCESSING or QUARANTINED.
    Raises `StoreUnavailable` when the store does not answer; what was removed until then is gone.
    """

    def step(limit: int) -> Did:
        removed = expiry.sweep(horizon=horizon, limit=limit)
        # Not until a batch is not full: others at the same work may have had the rest of it.
        return Did(removed, more=removed > 0)

    drained = drain.run(step)
    return Expiration(drained.touched, drained.shrunk, drained.finished)
