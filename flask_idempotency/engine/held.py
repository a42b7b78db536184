"""What a winner holds, and how it lets go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flask_idempotency.engine.events import Event
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.outcome import Grant
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.ports import Binding
from flask_idempotency.engine.record import OnLapse
from flask_idempotency.engine.request import ClaimRequest


@dataclass(frozen=True, slots=True)
class Held:
    """What is held, and on which terms. `bindings` has one entry, or one more for each secret still being rotated out;
    `granted` has for each of them what was asked, and what was granted."""

    bindings: tuple[Binding, ...]
    granted: tuple[tuple[ClaimRequest, Grant], ...]
    token: bytes = field(repr=False)
    policy: Policy
    on_lapse: OnLapse
    record: str
    operation: str

    @property
    def keys(self) -> tuple[StorageKey, ...]:
        return tuple(binding.key for binding in self.bindings)


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a claim ends: the write that each of its keys needs, and what to tell when the store has taken it."""

    write: Callable[[StorageKey], None]
    event: Callable[[], Event] | None = None
    holds_on: bool = True
    """Whether the keys stay this claim's until the store takes it. False: nobody is at work, and perhaps none was granted."""
