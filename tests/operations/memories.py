"""A memory that stands as a test says, and does as it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, DataLossStatus, Grant, Record

PARTS = 8
NOW, LOST = 1000.0, 940.0


@dataclass(frozen=True)
class Told:
    """What a store was told: it implements `memory.Rules`."""

    store_id: str | None = "shop"
    after_loss: str = "refuse"
    grace: float = 100.0


@dataclass
class Kept:
    """Implements `memory.Memory`. `refusal` is what it says to whoever changes it."""

    how: DataLossStatus
    rules: Told = field(default_factory=Told)
    refusal: str = ""
    asked: list[Any] = field(default_factory=list)

    def status(self) -> DataLossStatus:
        return self.how

    def initialise(self) -> str:
        return self._done("initialise") or self.how.store_id or "anew"

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        self._done(("acknowledge", forced))
        return self.how

    def restore_claim(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        raise NotImplementedError

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, record: Record | None = None) -> bool:
        raise NotImplementedError

    def _done(self, what: object) -> str:
        if self.refusal:
            raise ConfigurationError(self.refusal)
        self.asked.append(what)
        return ""


def standing(
    *, blind: bool = False, store_id: str | None = "shop", hold: float = 100.0, **parts: int
) -> DataLossStatus:
    """The other parts are fine. What is lost was so a minute ago."""
    fine = PARTS - sum(parts.values())
    lost = {"missing", "foreign", "changed"} & set(parts)
    return DataLossStatus(
        store_id=store_id,
        parts={**parts, **({"fine": fine} if fine else {})},
        since=LOST if parts else None,
        now=NOW,
        may_be_acknowledged_at=LOST + hold if lost else None,
        notices_restarts=not blind,
    )
