"""Saying that the janitor is alive, and what the clocks say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flask_idempotency.engine.capabilities import Entry


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a janitor finds when it looks at two clocks: its own, and the store's. All in whole milliseconds."""

    skew_ms: int = 0
    """By how much the store's clock is ahead of this host's."""
    stepped_ms: int = 0
    """By how much that has changed since the last heartbeat. Whoever sets the store's clock ends lives and leases."""
    finished: bool = True


def heartbeat(last: Mapping[str, Entry], *, store_now: float, host_now: float) -> Heartbeat:
    """What is to be written down now. The last one may be another host's: then a step is what tells the two apart."""
    skew_ms = round((store_now - host_now) * 1000)
    entry = last.get("heartbeat")
    before = None if entry is None else entry.whole("skew_ms")
    return Heartbeat(skew_ms, stepped_ms=0 if before is None else skew_ms - before)
